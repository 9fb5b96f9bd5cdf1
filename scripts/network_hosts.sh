#!/usr/bin/env bash
# Several hosts on one machine: each a network namespace with two network cards, for data (bandwidth and delay as given) and
# for management (as it is), so that MPI runs over TCP between them and a data link can be cut.
#
#   network_hosts.sh up HOSTS [RATE [DELAY]]     for example: up 4 1gbit 50us
#   network_hosts.sh run COMMAND…                mpirun COMMAND with one rank on each host, and all FLASHOVERLAP_ variables
#   network_hosts.sh exec HOST COMMAND…          COMMAND on host 1, 2, …
#   network_hosts.sh link HOST down|up           cuts the host's data link, or mends it
#   network_hosts.sh down
#   network_hosts.sh check                       0 when this machine allows all that, else says why not and 77
#
# Needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN), iproute2 and, for run, OpenMPI. To have several sets of hosts at a time, give
# each a FO_HOSTS_PREFIX and a FO_HOSTS_SUBNET of its own: N takes 10.N.0.0/24 and 10.(N+1).0.0/24; default 77.
set -euo pipefail

prefix=${FO_HOSTS_PREFIX:-fo}
subnet=${FO_HOSTS_SUBNET:-77}
subnet_of_data=10.$subnet.0
subnet_of_management=10.$((subnet + 1)).0

usage() { sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
hosts() { ip netns list | awk '{print $1}' | grep -E "^$prefix-h[0-9]+$" | sort -V || true; }

check() {
  local reason=""
  if ! command -v ip > /dev/null || ! command -v tc > /dev/null; then
    reason="ip or tc is missing (Debian: apt-get install iproute2)"
  elif ! ip netns add "$prefix-check" 2> /dev/null; then
    reason="network namespaces cannot be made here (root is needed, in a container CAP_SYS_ADMIN)"
  else
    if ! ip -n "$prefix-check" link add data0 type veth peer name data1 2> /dev/null; then
      reason="veth pairs cannot be made here"
    elif ! tc -n "$prefix-check" qdisc add dev data0 root tbf rate 1gbit burst 512kb latency 100ms 2> /dev/null; then
      reason="the kernel has no token bucket filter (module sch_tbf)"
    fi
    ip netns delete "$prefix-check"
  fi
  [[ -z $reason ]] && return 0
  echo "network_hosts.sh: $reason" >&2
  return 77
}

# attach HOST CARD BRIDGE ADDRESS
attach() {
  local host=$1 card=$2 bridge=$3 address=$4 outer="$prefix-$2-${1##*-h}"
  ip link delete "$outer" 2> /dev/null || true # A host that was taken down may still be ending.
  ip link add "$outer" type veth peer name "$card" netns "$host"
  ip link set "$outer" master "$bridge" up
  ip -n "$host" address add "$address/24" dev "$card"
  ip -n "$host" link set "$card" up
}

# shape HOST RATE [DELAY]. A delay needs netem, which not every kernel has; a rate alone does not.
shape() {
  if [[ -n $3 ]]; then
    # The limit is in packets: room for what a fast sender has in flight, so that the rate is what limits it.
    tc -n "$1" qdisc add dev data0 root netem rate "$2" delay "$3" limit 20000 ||
      { echo "network_hosts.sh: this kernel has no netem: leave the delay out" >&2; return 77; }
  else
    tc -n "$1" qdisc add dev data0 root tbf rate "$2" burst 512kb latency 100ms
  fi
}

up() {
  local count=$1 rate=${2:-} delay=${3:-} i
  check
  down
  for bridge in data mgmt; do
    ip link add "$prefix-$bridge" type bridge
    ip link set "$prefix-$bridge" up
  done
  ip address add "$subnet_of_management.254/24" dev "$prefix-mgmt"
  for ((i = 1; i <= count; ++i)); do
    ip netns add "$prefix-h$i"
    ip -n "$prefix-h$i" link set lo up
    attach "$prefix-h$i" data0 "$prefix-data" "$subnet_of_data.$i"
    attach "$prefix-h$i" mgmt0 "$prefix-mgmt" "$subnet_of_management.$i"
    [[ -z $rate ]] || shape "$prefix-h$i" "$rate" "$delay"
  done
}

down() {
  local host
  for host in $(hosts); do
    ip netns pids "$host" | xargs -r kill -KILL 2> /dev/null || true
    ip netns delete "$host"
  done
  for bridge in data mgmt; do
    ip link delete "$prefix-$bridge" 2> /dev/null || true
  done
}

# As mpirun's remote shell: agent ADDRESS COMMAND…
agent() {
  local address=$1 host
  shift
  host=$prefix-h${address##*.}
  # A host name of its own: MPI takes processes of one name for neighbours in shared memory.
  exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
}

run() {
  local host list=""
  for host in $(hosts); do
    list+=${list:+,}$subnet_of_management.${host##*-h}:1
  done
  [[ -n $list ]] || { echo "network_hosts.sh: no hosts; network_hosts.sh up HOSTS first" >&2; exit 2; }
  agent_script="" # not local: the trap outlives this function
  agent_script=$(mktemp)
  trap 'rm -f "$agent_script"' EXIT
  printf '#!/bin/sh\nFO_HOSTS_PREFIX=%q exec %q agent "$@"\n' "$prefix" "$(realpath "${BASH_SOURCE[0]}")" > "$agent_script"
  chmod +x "$agent_script"
  local forwarded=() name
  for name in $(compgen -e FLASHOVERLAP_); do forwarded+=(-x "$name"); done
  mpirun "${forwarded[@]}" --allow-run-as-root --host "$list" --mca plm_rsh_agent "$agent_script" --mca plm rsh --mca orte_keep_fqdn_hostnames 1 \
    --mca oob_tcp_if_include "$subnet_of_management.0/24" --mca pml ob1 --mca btl self,tcp \
    --mca btl_tcp_if_include "$subnet_of_data.0/24" --mca orte_enable_recovery 1 \
    --mca rmaps_base_mapping_policy node --bind-to none "$@"
}

case ${1:-} in
  up) [[ $# -ge 2 ]] || usage; up "${@:2}" ;;
  down) down ;;
  run) [[ $# -ge 2 ]] || usage; run "${@:2}" ;;
  exec) [[ $# -ge 3 ]] || usage; ip netns exec "$prefix-h$2" "${@:3}" ;;
  link) [[ $# -eq 3 ]] || usage; ip -n "$prefix-h$2" link set data0 "$3" ;;
  check) check ;;
  agent) agent "${@:2}" ;;
  *) usage ;;
esac

#!/usr/bin/env bash
# Ranks on two hosts (network namespaces) over TCP: results are right; when the data link of one is cut in the middle, both
# ranks end with a time-out that names the other.
#   hosts_test.sh NETWORK_HOSTS_SH COLLECTIVES_TEST SOAK
set -euo pipefail
hosts=$1 collectives=$2 soak=$3
export FO_HOSTS_PREFIX=fot

"$hosts" check
log=$(mktemp)
trap '"$hosts" down; rm -f "$log"' EXIT
"$hosts" up 2 1gbit

timeout 120 "$hosts" run "$collectives" --gtest_filter='*_1:*_2:-*_1[0-9]' > "$log" 2>&1 || { cat "$log"; exit 1; }
echo "two hosts: collectives are right"

timeout_s=3
export FLASHOVERLAP_TIMEOUT_MS=${timeout_s}000
timeout -s KILL 60 "$hosts" run "$soak" 1000000 > "$log" 2>&1 &
job=$!
sleep 5
kill -0 $job || { cat "$log"; echo "the soak ended before the link was cut"; exit 1; }
"$hosts" link 2 down
begin=$SECONDS
wait $job || true # With orte_enable_recovery mpirun's exit code says nothing.
took=$((SECONDS - begin))
for rank in 0 1; do
  # Each rank names itself first where it noticed, else the rank that told it.
  grep -q "mpi_soak: .*rank $((1 - rank)) .*does not answer" "$log" || { cat "$log"; echo "nobody names rank $((1 - rank))"; exit 1; }
done
# Time-out, 5 s to throw, 4 s for MPI to end, and what starting and ending take.
[[ $took -le $((timeout_s + 5 + 7)) ]] || { cat "$log"; echo "took $took s"; exit 1; }
echo "link cut: both ranks threw, all over after $took s"

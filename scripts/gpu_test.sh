#!/usr/bin/env bash
# The GPU tests: builds them, and runs them where there is a CUDA device. Called by `./dev gpu-test`.
#
#   gpu_test.sh [FILTER]            all tests whose name contains FILTER
#   gpu_test.sh --processes N [FILTER]
#                                   as N processes that are a rank each, on as many devices, or all on device 0
#   gpu_test.sh --sanitize [FILTER] under compute-sanitizer: memcheck, racecheck, synccheck, initcheck (TOOLS="..." names
#                                   others), as two processes, each under a tool of its own: within one process the tool waits
#                                   for the device, and one rank for another. Without NCCL, in whose kernels the tools find
#                                   much; with one random case of each kind (FLASHOVERLAP_TEST_CASES)
#   gpu_test.sh --queues            the test of hardware queues with CUDA_DEVICE_MAX_CONNECTIONS 1, 8 and 32
#   GPU_TEST=PATH                   a binary that is built already; nothing is built then
#
# All tests of plain mode end with those of the Python package (python/tests/gpu_arrays.py): by FLASHOVERLAP_GPU_PYTHON, an
# interpreter in whose environment the package was installed with CUDA (docs/python.md); otherwise python3.
#
# Tests with NCCL need a version that lets ranks share a GPU (2.30.7 or later); FLASHOVERLAP_NCCL_LIBRARY names one. Without it
# they are skipped, by name. The same with NVSHMEM, for ranks that are processes: FLASHOVERLAP_NVSHMEM_LIBRARY.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=plain
case ${1:-} in
  --sanitize) mode=sanitize; shift ;;
  --queues) mode=queues; shift ;;
  --processes)
    mode=processes
    processes=${2:-}
    [[ $processes =~ ^[1-9][0-9]*$ ]] || { echo "gpu_test: --processes needs a number, got '$processes'" >&2; exit 2; }
    shift 2
    ;;
  --*) echo "gpu_test: '$1' is not accepted; expected --sanitize, --processes or --queues" >&2; exit 2 ;;
esac
filter=${1:-}

binary=${GPU_TEST:-}
if [[ -z $binary ]]; then
  ./dev build cuda >&2
  binary=build/cuda/tests/gpu/flashoverlap_gpu_test
fi

if ! nvidia-smi -L 2> /dev/null | grep -q '^GPU '; then
  echo "skipped: no CUDA device ($(cat tests/gpu/*_test.cpp | grep -c "^GPU_TEST(") tests, and python/tests/gpu_arrays.py)"
  exit 0
fi

as_processes() { # N COMMAND...: a rank each, whose number stands before what it prints
  local processes=$1 rank process status=0 started=()
  shift
  export FLASHOVERLAP_WORLD_SIZE=$processes FLASHOVERLAP_RENDEZVOUS=127.0.0.1:$((20000 + RANDOM % 10000))
  for ((rank = 0; rank < processes; ++rank)); do
    (export FLASHOVERLAP_RANK=$rank FLASHOVERLAP_LOCAL_RANK=$rank && "$@" 2>&1 | sed -u "s/^/$rank: /") &
    started+=($!)
  done
  for process in "${started[@]}"; do wait "$process" || status=1; done
  unset FLASHOVERLAP_WORLD_SIZE FLASHOVERLAP_RENDEZVOUS
  return $status
}

sanitized() { # TOOL FILTER; cuBLAS's own kernels are not looked at
  timeout 900 compute-sanitizer --tool "$1" --error-exitcode 9 --launch-timeout 0 --kernel-name-exclude kns=nvjet "$binary" "$2"
}

export CUDA_MODULE_LOADING=EAGER NCCL_NVLS_ENABLE=0
case $mode in
  plain)
    timeout 900 "$binary" "$filter"
    if [[ -z $filter ]]; then
      echo "# python/tests/gpu_arrays.py"
      timeout 300 "${FLASHOVERLAP_GPU_PYTHON:-python3}" python/tests/gpu_arrays.py
    fi
    ;;
  processes)
    as_processes "$processes" timeout 900 "$binary" "$filter"
    ;;
  queues)
    for queues in 1 8 32; do
      echo "# CUDA_DEVICE_MAX_CONNECTIONS=$queues"
      CUDA_DEVICE_MAX_CONNECTIONS=$queues timeout 120 "$binary" one_rank_with_transfers
    done
    ;;
  sanitize)
    export FLASHOVERLAP_NCCL_LIBRARY=none FLASHOVERLAP_TEST_PATIENCE=4
    export FLASHOVERLAP_TEST_CASES=${FLASHOVERLAP_TEST_CASES:-1}
    status=0
    for tool in ${TOOLS:-memcheck racecheck synccheck initcheck}; do
      echo "# compute-sanitizer --tool $tool"
      [[ -n $filter ]] || sanitized "$tool" kernel_,one_rank || status=1
      as_processes 2 sanitized "$tool" "${filter:--kernel_,-one_rank}" || status=1
    done
    exit $status
    ;;
esac

#!/usr/bin/env bash
# The GPU tests: builds them, and runs them where there is a CUDA device. Called by `./dev gpu-test`.
#
#   gpu_test.sh [FILTER]            all tests whose name contains FILTER
#   gpu_test.sh --sanitize [FILTER] the same under compute-sanitizer: memcheck, racecheck, synccheck, initcheck (TOOLS="..."
#                                   names others). Ranks are processes, each under a tool of its own: within one process the
#                                   tool waits for the device, and one rank for another. Without NCCL, in whose kernels the
#                                   tools find much; with one random case of each kind (FLASHOVERLAP_TEST_CASES)
#   gpu_test.sh --queues            the test of hardware queues with CUDA_DEVICE_MAX_CONNECTIONS 1, 8 and 32
#   GPU_TEST=PATH                   a binary that is built already; nothing is built then
#
# All tests of plain mode end with those of the Python package (python/tests/gpu_arrays.py): by FLASHOVERLAP_GPU_PYTHON, an
# interpreter in whose environment the package was installed with CUDA (docs/python.md); otherwise python3.
#
# Tests with NCCL need a version that lets ranks share a GPU (2.30.7 or later); FLASHOVERLAP_NCCL_LIBRARY names one. Without it
# they are skipped, by name.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=plain
case ${1:-} in
  --sanitize) mode=sanitize; shift ;;
  --queues) mode=queues; shift ;;
  --*) echo "gpu_test: '$1' is not accepted; expected --sanitize or --queues" >&2; exit 2 ;;
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

sanitized() { # TOOL FILTER; cuBLAS's own kernels are not looked at
  timeout 900 compute-sanitizer --tool "$1" --error-exitcode 9 --launch-timeout 0 --kernel-name-exclude kns=nvjet "$binary" "$2"
}

two_ranks() { # TOOL FILTER; the other rank's output follows where it failed
  export FLASHOVERLAP_WORLD_SIZE=2 FLASHOVERLAP_RENDEZVOUS=127.0.0.1:$((20000 + RANDOM % 10000))
  local other status=0
  other=$(mktemp)
  FLASHOVERLAP_RANK=1 FLASHOVERLAP_LOCAL_RANK=1 sanitized "$@" > "$other" 2>&1 &
  FLASHOVERLAP_RANK=0 FLASHOVERLAP_LOCAL_RANK=0 sanitized "$@" || status=$?
  wait $! || { status=$?; echo "# rank 1:"; cat "$other"; }
  rm "$other"
  unset FLASHOVERLAP_WORLD_SIZE FLASHOVERLAP_RENDEZVOUS
  return $status
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
  queues)
    for queues in 1 8 32; do
      echo "# CUDA_DEVICE_MAX_CONNECTIONS=$queues"
      CUDA_DEVICE_MAX_CONNECTIONS=$queues timeout 120 "$binary" one_rank_with_transfers
    done
    ;;
  sanitize)
    export FLASHOVERLAP_NCCL_LIBRARY=none FLASHOVERLAP_TEST_PATIENCE=4
    export FLASHOVERLAP_TEST_CASES=${FLASHOVERLAP_TEST_CASES:-1}
    for tool in ${TOOLS:-memcheck racecheck synccheck initcheck}; do
      if [[ -z $filter ]]; then
        echo "# compute-sanitizer --tool $tool: one rank"
        sanitized "$tool" kernel_,one_rank
      fi
      echo "# compute-sanitizer --tool $tool: two ranks"
      two_ranks "$tool" "${filter:--kernel_,-one_rank}"
    done
    ;;
esac

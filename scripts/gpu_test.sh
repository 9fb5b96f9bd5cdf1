#!/usr/bin/env bash
# The GPU tests: builds them, and runs them where there is a CUDA device. Called by `./dev gpu-test`.
#
#   gpu_test.sh [FILTER]            all tests whose name contains FILTER
#   gpu_test.sh --sanitize [FILTER] the same under compute-sanitizer: memcheck, racecheck, synccheck, initcheck
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
    for tool in memcheck racecheck synccheck initcheck; do
      echo "# compute-sanitizer --tool $tool"
      timeout 1800 compute-sanitizer --tool "$tool" --error-exitcode 9 --launch-timeout 0 "$binary" "$filter"
    done
    ;;
esac

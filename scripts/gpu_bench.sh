#!/usr/bin/env bash
# The GPU benchmarks: builds them, and runs them where there is a CUDA device. Called by `./dev gpu-bench`.
#
#   gpu_bench.sh [NAME [ARGS]]   one benchmark (signal_gemm_bench, grouped_gemm_bench, restore_bench, epilogue_bench, rehearsal, cluster_bench,
#                                nccl_buffers_bench) with its arguments; all without NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

./dev build cuda >&2
folder=build/cuda/bench/gpu
names=()
for program in "$folder"/*; do
  if [[ -f $program && -x $program ]]; then names+=("${program##*/}"); fi
done

if ! nvidia-smi -L 2> /dev/null | grep -q '^GPU '; then
  echo "skipped: no CUDA device (${#names[@]} benchmarks: ${names[*]})"
  exit 0
fi

export CUDA_MODULE_LOADING=EAGER NCCL_NVLS_ENABLE=0
if [[ $# -gt 0 ]]; then
  name=$1
  shift
  if [[ ! -x $folder/$name ]]; then
    echo "gpu_bench: '$name' is not a benchmark; there are: ${names[*]}" >&2
    exit 2
  fi
  exec "$folder/$name" "$@"
fi
for name in "${names[@]}"; do
  if [[ $name == cluster_bench ]]; then continue; fi # it is for several GPUs: ./dev gpu-cluster-bench
  echo "# $name"
  timeout 900 "$folder/$name"
done

// Ends a benchmark or test program at the first CUDA call that fails.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#define BENCH_CUDA(call)                                                                                    \
  do {                                                                                                      \
    const cudaError_t bench_status = (call);                                                                \
    if (bench_status != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(bench_status)); \
      std::exit(1);                                                                                         \
    }                                                                                                       \
  } while (0)

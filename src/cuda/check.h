// Checking of CUDA calls inside src/cuda.
#pragma once

#include <cuda_runtime_api.h>

namespace flashoverlap::cuda {

/// Throws flashoverlap::Error that names the call, the place and CUDA's own text, unless `status` is
/// cudaSuccess.
void check(cudaError_t status, const char* call, const char* file, int line);

/// Throws flashoverlap::Error (bad argument) with this text.
[[noreturn]] void throw_bad_argument(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace flashoverlap::cuda

#define FLASHOVERLAP_CUDA_CHECK(call) ::flashoverlap::cuda::check((call), #call, __FILE__, __LINE__)

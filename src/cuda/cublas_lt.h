// What all uses of cuBLASLt share.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>

#include "flashoverlap/dtype.h"

namespace flashoverlap::cuda {

/// Throws Error(kDevice) that names the call and the library's own text, unless `status` is success.
void check_cublas(cublasStatus_t status, const char* call);

/// One for each device, until the process ends: cublasLtDestroy waits for the device, where another rank's
/// GEMM may wait for what this rank sends next. The device must be current.
cublasLtHandle_t cublas_handle_of(int device);

cudaDataType_t cublas_type(DType dtype);

/// Column-major, as the library sees matrices. The caller destroys it.
cublasLtMatrixLayout_t make_cublas_layout(cudaDataType_t type, std::int64_t rows, std::int64_t cols,
                                          std::int64_t ld);

/// What algorithms may take for granted: so much workspace, and how operands and results lie, in bytes
/// (without that the library takes them for aligned to 256). The caller destroys it.
cublasLtMatmulPreference_t make_cublas_preference(std::size_t workspace_bytes, std::int64_t operand_alignment,
                                                  std::int64_t result_alignment);

}  // namespace flashoverlap::cuda

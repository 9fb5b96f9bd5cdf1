#include "cublas_lt.h"

#include <map>
#include <mutex>

#include "core/fail.h"

namespace flashoverlap::cuda {

void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  core::fail(ErrorKind::kDevice, "{}: {}", call, cublasLtGetStatusString(status));
}

cublasLtHandle_t cublas_handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::scoped_lock lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) check_cublas(cublasLtCreate(&handle), "cublasLtCreate");
  return handle;
}

cudaDataType_t cublas_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat16:
      return CUDA_R_16F;
  }
  core::fail(ErrorKind::kInternal, "an element type without a CUDA type");
}

cublasLtMatrixLayout_t make_cublas_layout(cudaDataType_t type, std::int64_t rows, std::int64_t cols,
                                          std::int64_t ld) {
  cublasLtMatrixLayout_t layout = nullptr;
  check_cublas(cublasLtMatrixLayoutCreate(&layout, type, static_cast<std::uint64_t>(rows),
                                          static_cast<std::uint64_t>(cols), ld),
               "cublasLtMatrixLayoutCreate");
  return layout;
}

cublasLtMatmulPreference_t make_cublas_preference(std::size_t workspace_bytes, std::int64_t operand_alignment,
                                                  std::int64_t result_alignment) {
  cublasLtMatmulPreference_t preference = nullptr;
  check_cublas(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check_cublas(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
                 "cublasLtMatmulPreferenceSetAttribute");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  const auto operand = static_cast<std::uint32_t>(operand_alignment);
  const auto result = static_cast<std::uint32_t>(result_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, operand);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, operand);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, result);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, result);
  return preference;
}

}  // namespace flashoverlap::cuda

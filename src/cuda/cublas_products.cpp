#include "cublas_products.h"

#include <algorithm>

#include "core/fail.h"
#include "cublas_lt.h"

namespace flashoverlap::cuda {
namespace {

constexpr std::int64_t kWorkspaceBytes = 32LL << 20;
constexpr std::int64_t kVectorBytes = 16;

cublasLtHandle_t handle_on(int device) {
  const DeviceScope scope(device);
  return cublas_handle_of(device);
}

template <class Value>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  check_cublas(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value),
               "cublasLtMatmulDescSetAttribute");
}

}  // namespace

CublasProducts::CublasProducts(int device, int num_sms)
    : device_(device),
      num_sms_(num_sms),
      handle_(handle_on(device)),
      workspace_(device, kWorkspaceBytes, "cuBLAS") {}

CublasProducts::Owned<cublasLtMatmulPreference_t> CublasProducts::preference_for(const Key& key) const {
  const std::int64_t operand = key.is_aligned ? kVectorBytes : size_of(key.dtype);
  const std::int64_t result = key.is_aligned ? kVectorBytes : std::int64_t{sizeof(float)};
  return Owned<cublasLtMatmulPreference_t>(
      make_cublas_preference(static_cast<std::size_t>(workspace_.bytes()), operand, result));
}

CublasProducts::Prepared CublasProducts::prepare(const Key& key) const {
  // cuBLAS is column-major: it sees Dᵀ[n,m] = Bᵀ[n,k] · A[k,m], of which Bᵀ lies as it is and A transposed.
  Prepared prepared;
  cublasLtMatmulDesc_t operation = nullptr;
  check_cublas(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
               "cublasLtMatmulDescCreate");
  prepared.operation.reset(operation);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_T);
  set(operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, std::int32_t{num_sms_});
  const cudaDataType_t type = cublas_type(key.dtype);
  prepared.a.reset(make_cublas_layout(type, key.m, key.k, key.m));
  prepared.b.reset(make_cublas_layout(type, key.n, key.k, key.n));
  prepared.d.reset(make_cublas_layout(CUDA_R_32F, key.n, key.m, key.n));
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_, operation, prepared.b.get(), prepared.a.get(), prepared.d.get(),
                                     prepared.d.get(), preference_for(key).get(), 1, &found, &count);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
    core::fail(ErrorKind::kUnsupported,
               "cuBLAS has no algorithm for a product over {} rows to {} x {} {}: {}", key.k, key.m, key.n,
               name_of(key.dtype), cublasLtGetStatusString(status));
  }
  prepared.algorithm = found.algo;
  return prepared;
}

void CublasProducts::launch(const Shape& shape, const void* a, const void* b, float* d, cudaStream_t stream) {
  const DeviceScope scope(device_);
  const auto is_aligned = [](const void* pointer, std::int64_t ld_bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % kVectorBytes == 0 && ld_bytes % kVectorBytes == 0;
  };
  const std::int64_t element = size_of(shape.dtype);
  const Key key{.m = shape.m,
                .n = shape.n,
                .k = shape.k,
                .dtype = shape.dtype,
                .is_aligned = is_aligned(a, shape.m * element) && is_aligned(b, shape.n * element) &&
                              is_aligned(d, shape.n * std::int64_t{sizeof(float)})};
  auto at = prepared_.find(key);
  if (at == prepared_.end()) at = prepared_.emplace(key, prepare(key)).first;
  const Prepared& p = at->second;
  const float one = 1.0F;
  const float zero = 0.0F;
  check_cublas(cublasLtMatmul(handle_, p.operation.get(), &one, b, p.b.get(), a, p.a.get(), &zero, d,
                              p.d.get(), d, p.d.get(), &p.algorithm, workspace_.data(),
                              static_cast<std::size_t>(workspace_.bytes()), stream),
               "cublasLtMatmul");
}

}  // namespace flashoverlap::cuda

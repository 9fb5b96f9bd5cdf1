#include "cublas_gemm.h"

#include <algorithm>
#include <limits>

#include "check.h"
#include "core/fail.h"
#include "cublas_lt.h"

namespace flashoverlap::cuda {
namespace {

constexpr int kMaxAlgorithms = 16;

// A matrix as cuBLAS sees it, column-major, and how far apart those of a batch are.
struct Layout {
  cudaDataType_t type;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t ld;
  std::int64_t batch;
  std::int64_t stride;
};

cublasLtMatrixLayout_t make_layout(const Layout& from) {
  cublasLtMatrixLayout_t layout = make_cublas_layout(from.type, from.rows, from.cols, from.ld);
  if (from.batch == 1) return layout;
  const auto batch = static_cast<std::int32_t>(from.batch);
  check_cublas(
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
      "cublasLtMatrixLayoutSetAttribute");
  check_cublas(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                &from.stride, sizeof from.stride),
               "cublasLtMatrixLayoutSetAttribute");
  return layout;
}

}  // namespace

CublasGemm::CublasGemm(int device, DType dtype, const Shape& shape, int num_sms, void* workspace)
    : device_(device), shape_(shape), workspace_(workspace) {
  const DeviceScope scope(device);
  handle_ = cublas_handle_of(device);
  // cuBLAS is column-major: it sees Dᵀ[n,m] = Bᵀ-stored-as-B · Aᵀ, and a B [k,n] as Bᵀ itself.
  check_cublas(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
               "cublasLtMatmulDescCreate");
  const cublasOperation_t of_b = shape.b_is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  check_cublas(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &of_b, sizeof of_b),
               "cublasLtMatmulDescSetAttribute");
  const std::int32_t sms = num_sms;
  check_cublas(
      cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &sms, sizeof sms),
      "cublasLtMatmulDescSetAttribute");
  const cudaDataType_t type = cublas_type(dtype);
  const std::int64_t b_rows = shape.b_is_transposed ? shape.k : shape.n;
  const std::int64_t b_cols = shape.b_is_transposed ? shape.n : shape.k;
  layout_b_ = make_layout({type, b_rows, b_cols, shape.ldb, shape.batch, shape.stride_b});
  layout_a_ = make_layout({type, shape.k, shape.m, shape.lda, shape.batch, shape.stride_a});
  layout_d_ = make_layout({cublas_type(shape.type_of_d.value_or(dtype)), shape.n, shape.m, shape.ldd,
                           shape.batch, shape.stride_d});
  cublasLtMatmulPreference_t preference =
      make_cublas_preference(kWorkspaceBytes, shape.alignment_bytes, shape.alignment_bytes);
  algorithms_.resize(kMaxAlgorithms);
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_, operation_, layout_b_, layout_a_, layout_d_, layout_d_,
                                     preference, kMaxAlgorithms, algorithms_.data(), &found);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
    core::fail(ErrorKind::kUnsupported,
               "cuBLAS has no algorithm for m={} n={} k={} lda={} ldb={} ldd={} {}: {}", shape.m, shape.n,
               shape.k, shape.lda, shape.ldb, shape.ldd, name_of(dtype), cublasLtGetStatusString(status));
  }
  algorithms_.resize(static_cast<std::size_t>(found));
}

CublasGemm::~CublasGemm() {
  cublasLtMatrixLayoutDestroy(layout_a_);
  cublasLtMatrixLayoutDestroy(layout_b_);
  cublasLtMatrixLayoutDestroy(layout_d_);
  cublasLtMatmulDescDestroy(operation_);
}

void CublasGemm::measure(const void* a, const void* b, void* d, cudaStream_t stream) {
  constexpr int kRounds = 5;
  const DeviceScope scope(device_);
  const Event begin(true);
  const Event end(true);
  std::vector<float> best_ms(algorithms_.size(), std::numeric_limits<float>::max());
  // The first round loads kernels and is not counted; taking turns lets a falling clock hit all alike.
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < algorithms_.size(); ++i) {
      begin.record(stream);
      launch_with(i, a, b, d, stream);
      end.record(stream);
      FLASHOVERLAP_CUDA_CHECK(cudaEventSynchronize(end.get()));
      float ms = 0;
      FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&ms, begin.get(), end.get()));
      if (round > 0) best_ms[i] = std::min(best_ms[i], ms);
    }
  }
  chosen_ = static_cast<std::size_t>(std::min_element(best_ms.begin(), best_ms.end()) - best_ms.begin());
  is_measured_ = true;
}

void CublasGemm::launch(const void* a, const void* b, void* d, cudaStream_t stream) const {
  launch_with(chosen_, a, b, d, stream);
}

void CublasGemm::launch_with(std::size_t algorithm, const void* a, const void* b, void* d,
                             cudaStream_t stream) const {
  const float one = 1.0F;
  const float zero = 0.0F;
  check_cublas(cublasLtMatmul(handle_, operation_, &one, b, layout_b_, a, layout_a_, &zero, d, layout_d_, d,
                              layout_d_, &algorithms_[algorithm].algo, workspace_, kWorkspaceBytes, stream),
               "cublasLtMatmul");
}

}  // namespace flashoverlap::cuda

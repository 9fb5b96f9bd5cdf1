// cuBLAS as the baseline: the quickest algorithm that its heuristics offer for a shape and a number of SMs.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bench_check.h"

#define BENCH_CUBLAS(call)                                                                          \
  do {                                                                                              \
    const cublasStatus_t bench_status = (call);                                                     \
    if (bench_status != CUBLAS_STATUS_SUCCESS) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: status %d\n", __FILE__, __LINE__, #call, (int)bench_status); \
      std::exit(1);                                                                                 \
    }                                                                                               \
  } while (0)

namespace bench {

class CublasGemm {
 public:
  // D[m,n] = A[m,k] · B[n,k]ᵀ, all row-major, 16-bit elements, float32 accumulation. Column-major cuBLAS sees
  // Dᵀ = B · Aᵀ.
  CublasGemm(cublasLtHandle_t handle, cudaDataType_t type, int m, int n, int k, int num_sms, const void* a,
             const void* b, void* d, void* workspace, std::size_t workspace_bytes)
      : handle_(handle), a_(a), b_(b), d_(d), workspace_(workspace), workspace_bytes_(workspace_bytes) {
    BENCH_CUBLAS(cublasLtMatmulDescCreate(&op_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    BENCH_CUBLAS(
        cublasLtMatmulDescSetAttribute(op_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    const std::int32_t sms = num_sms;
    BENCH_CUBLAS(cublasLtMatmulDescSetAttribute(op_, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &sms, sizeof sms));
    make_layout(&layout_b_, type, k, n);
    make_layout(&layout_a_, type, k, m);
    make_layout(&layout_d_, type, n, m);
    cublasLtMatmulPreference_t preference;
    BENCH_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
    BENCH_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &workspace_bytes, sizeof workspace_bytes));
    algorithms_.resize(kMaxAlgorithms);
    int found = 0;
    BENCH_CUBLAS(cublasLtMatmulAlgoGetHeuristic(handle, op_, layout_b_, layout_a_, layout_d_, layout_d_,
                                                preference, kMaxAlgorithms, algorithms_.data(), &found));
    algorithms_.resize(static_cast<std::size_t>(found));
    BENCH_CUBLAS(cublasLtMatmulPreferenceDestroy(preference));
  }
  CublasGemm(const CublasGemm&) = delete;
  CublasGemm& operator=(const CublasGemm&) = delete;
  ~CublasGemm() {
    cublasLtMatrixLayoutDestroy(layout_a_);
    cublasLtMatrixLayoutDestroy(layout_b_);
    cublasLtMatrixLayoutDestroy(layout_d_);
    cublasLtMatmulDescDestroy(op_);
  }

  std::size_t num_algorithms() const { return algorithms_.size(); }
  void choose(std::size_t algorithm) { chosen_ = algorithm; }
  std::size_t chosen() const { return chosen_; }

  void launch(cudaStream_t stream) const {
    const float one = 1.0F;
    const float zero = 0.0F;
    BENCH_CUBLAS(cublasLtMatmul(handle_, op_, &one, b_, layout_b_, a_, layout_a_, &zero, d_, layout_d_, d_,
                                layout_d_, &algorithms_[chosen_].algo, workspace_, workspace_bytes_, stream));
  }

 private:
  static void make_layout(cublasLtMatrixLayout_t* layout, cudaDataType_t type, int rows, int columns) {
    BENCH_CUBLAS(cublasLtMatrixLayoutCreate(layout, type, static_cast<std::uint64_t>(rows),
                                            static_cast<std::uint64_t>(columns), rows));
  }

  static constexpr int kMaxAlgorithms = 16;
  cublasLtHandle_t handle_;
  const void* a_;
  const void* b_;
  void* d_;
  void* workspace_;
  std::size_t workspace_bytes_;
  cublasLtMatmulDesc_t op_{};
  cublasLtMatrixLayout_t layout_a_{}, layout_b_{}, layout_d_{};
  std::vector<cublasLtMatmulHeuristicResult_t> algorithms_;
  std::size_t chosen_ = 0;
};

}  // namespace bench

// cuBLAS's GEMM: the serial baseline's, and one over a batch of matrices.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "device.h"
#include "flashoverlap/dtype.h"

namespace flashoverlap::cuda {

/// D[m,n] = A[m,k] · B[n,k]ᵀ, all row-major, float32 accumulation, with the best of the algorithms that
/// cuBLAS's heuristics offer. For each matrix of a batch, if there is one.
class CublasGemm {
 public:
  struct Shape {
    std::int64_t m = 0;  ///< All >= 1.
    std::int64_t n = 0;
    std::int64_t k = 0;
    std::int64_t lda = 0;
    std::int64_t ldb = 0;
    std::int64_t ldd = 0;
    std::optional<DType> type_of_d = {};  ///< Not set: that of A and B.
    bool b_is_transposed = true;          ///< false: B is [k,n], and D = A · B.
    std::int64_t batch = 1;               ///< Products of matrices that lie `stride` elements apart.
    std::int64_t stride_a = 0;
    std::int64_t stride_b = 0;
    std::int64_t stride_d = 0;
    std::int64_t alignment_bytes = 256;  ///< Of where A, B and D begin: a power of two.
    bool operator==(const Shape&) const = default;
  };

  static constexpr std::int64_t kWorkspaceBytes = 64LL << 20;

  /// `num_sms`: what cuBLAS is told that it may use. `workspace`: kWorkspaceBytes that must stay until the
  /// device is done with the last launch, which this object need not; GEMMs of one stream can share them.
  /// Error(kUnsupported) where cuBLAS has no algorithm for the shape.
  CublasGemm(int device, DType dtype, const Shape& shape, int num_sms, void* workspace);
  ~CublasGemm();
  CublasGemm(const CublasGemm&) = delete;
  CublasGemm& operator=(const CublasGemm&) = delete;

  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] std::size_t num_algorithms() const { return algorithms_.size(); }
  [[nodiscard]] bool is_measured() const { return is_measured_; }

  /// Times every algorithm on these matrices in `stream` and keeps the quickest. Waits for the stream;
  /// overwrites D.
  void measure(const void* a, const void* b, void* d, cudaStream_t stream);
  /// Enqueues it; returns at once.
  void launch(const void* a, const void* b, void* d, cudaStream_t stream) const;

 private:
  void launch_with(std::size_t algorithm, const void* a, const void* b, void* d, cudaStream_t stream) const;

  int device_;
  Shape shape_;
  cublasLtHandle_t handle_ = nullptr;  // the device's, not owned
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t layout_a_ = nullptr;
  cublasLtMatrixLayout_t layout_b_ = nullptr;
  cublasLtMatrixLayout_t layout_d_ = nullptr;
  void* workspace_;
  std::vector<cublasLtMatmulHeuristicResult_t> algorithms_;
  std::size_t chosen_ = 0;
  bool is_measured_ = false;
};

}  // namespace flashoverlap::cuda

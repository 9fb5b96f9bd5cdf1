// Products over rows, by cuBLAS: gradients of weights.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <type_traits>

#include "device.h"
#include "flashoverlap/dtype.h"

namespace flashoverlap::cuda {

/// D[m,n] = A[k,m]ᵀ · B[k,n], A and B of 16-bit elements, D of float32, all row-major and dense, in float32.
/// Bitwise repeatable: the shape and whether all matrices are aligned to 16 bytes decide on the algorithm.
class CublasProducts {
 public:
  struct Shape {
    std::int64_t m = 0;  ///< All >= 1.
    std::int64_t n = 0;
    std::int64_t k = 0;
    DType dtype = DType::kBFloat16;  ///< kBFloat16 or kFloat16
  };

  /// `num_sms`: what cuBLAS is told that it may use. Of one stream at a time, which must have passed all
  /// launches before this object goes.
  CublasProducts(int device, int num_sms);

  /// Enqueues it; returns at once, but for the first one of its shape, which may load kernels.
  /// Error(kUnsupported) where cuBLAS has no algorithm for the shape.
  void launch(const Shape& shape, const void* a, const void* b, float* d, cudaStream_t stream);

  [[nodiscard]] std::int64_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  struct Key {
    std::int64_t m, n, k;
    DType dtype;
    bool is_aligned;
    auto operator<=>(const Key&) const = default;
  };
  struct Destroy {
    void operator()(cublasLtMatmulDesc_t operation) const { (void)cublasLtMatmulDescDestroy(operation); }
    void operator()(cublasLtMatrixLayout_t layout) const { (void)cublasLtMatrixLayoutDestroy(layout); }
    void operator()(cublasLtMatmulPreference_t preference) const {
      (void)cublasLtMatmulPreferenceDestroy(preference);
    }
  };
  template <class Handle>
  using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;
  struct Prepared {
    Owned<cublasLtMatmulDesc_t> operation;
    Owned<cublasLtMatrixLayout_t> a, b, d;
    cublasLtMatmulAlgo_t algorithm;
  };

  [[nodiscard]] Prepared prepare(const Key& key) const;
  [[nodiscard]] Owned<cublasLtMatmulPreference_t> preference_for(const Key& key) const;

  int device_;
  int num_sms_;
  cublasLtHandle_t handle_;  // the device's, not owned
  DeviceBuffer workspace_;
  std::map<Key, Prepared> prepared_;
};

}  // namespace flashoverlap::cuda

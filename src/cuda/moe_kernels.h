// Passes over the rows of a mixture-of-experts layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flashoverlap/dtype.h"
#include "flashoverlap/executor.h"

namespace flashoverlap::cuda {

/// to[place[i], :] = source[i] < 0 ? 0 : from[source[i] / top_k, :] [* weight[source[i]]] for i < rows. Rows
/// of 16-bit elements; `to` is dense.
struct GatherRowsParams {
  const std::int32_t* source = nullptr;
  std::int32_t top_k = 1;
  const std::int32_t* place = nullptr;  ///< Null: i.
  const float* weight = nullptr;        ///< Null: copies, of any type.
  DType dtype = DType::kBFloat16;       ///< With weights: kBFloat16 or kFloat16
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const void* from = nullptr;
  std::int64_t from_ld = 0;  ///< elements
  void* to = nullptr;
};
void launch_gather_rows(const GatherRowsParams& params, cudaStream_t stream);

/// to[r, c] = activation(from[r, c]) [* from[r, cols + c]] for r < rows, c < cols, in float32, rounded once;
/// both dense, `from` with 2 cols columns when gated.
struct ActivateRowsParams {
  DType dtype = DType::kBFloat16;  ///< kBFloat16 or kFloat16
  Activation activation = Activation::kNone;
  bool gated = false;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const void* from = nullptr;
  void* to = nullptr;
};
void launch_activate_rows(const ActivateRowsParams& params, cudaStream_t stream);

/// to_gradient, as `from` of the activation, by that of its `to`, [rows, cols]: in float32, rounded once.
struct ActivateBackwardParams {
  DType dtype = DType::kBFloat16;  ///< kBFloat16 or kFloat16
  Activation activation = Activation::kNone;
  bool gated = false;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const void* from = nullptr;
  const void* gradient = nullptr;
  void* to_gradient = nullptr;
};
void launch_activate_backward(const ActivateBackwardParams& params, cudaStream_t stream);

/// to[i] = from[i]ᵀ for a stack of `count` dense matrices [rows, cols] of 16-bit elements.
struct TransposeParams {
  std::int64_t count = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const void* from = nullptr;
  void* to = nullptr;
};
void launch_transpose(const TransposeParams& params, cudaStream_t stream);

/// gradient[t, s] = out_gradient[t, :] · results[row[t, s], :] in float32, in an order that `cols` and the
/// alignment alone decide; 0 where row is -1. `results` is dense.
struct WeightGradientParams {
  DType dtype = DType::kBFloat16;  ///< kBFloat16 or kFloat16
  const std::int32_t* row = nullptr;
  std::int64_t tokens = 0;
  std::int32_t top_k = 1;
  std::int64_t cols = 0;
  const void* out_gradient = nullptr;
  std::int64_t out_gradient_ld = 0;  ///< elements
  const void* results = nullptr;
  float* gradient = nullptr;
};
void launch_weight_gradient(const WeightGradientParams& params, cudaStream_t stream);

/// to[t, :] = sum over s < top_k, in this order, of [weight[t, s] *] from[row[t, s], :], where row is not -1,
/// in float32, rounded once. `from` is dense.
struct ReduceRowsParams {
  DType dtype = DType::kBFloat16;  ///< kBFloat16 or kFloat16
  const std::int32_t* row = nullptr;
  const float* weight = nullptr;  ///< Null: 1.
  std::int64_t tokens = 0;
  std::int32_t top_k = 1;
  std::int64_t cols = 0;
  const void* from = nullptr;
  void* to = nullptr;
  std::int64_t to_ld = 0;  ///< elements
};
void launch_reduce_rows(const ReduceRowsParams& params, cudaStream_t stream);

/// Loads all of them on the current device.
void load_moe_kernels();
void load_moe_backward_kernels();  ///< Of these those in moe_backward_kernels.cu.

}  // namespace flashoverlap::cuda

// Passes over the rows of a mixture-of-experts layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flashoverlap/dtype.h"
#include "flashoverlap/executor.h"

namespace flashoverlap::cuda {

/// to[place[i], :] = token[i] < 0 ? 0 : from[token[i], :] for i < rows. Rows of 16-bit elements; `to` is
/// dense.
struct GatherRowsParams {
  const std::int32_t* token = nullptr;
  const std::int32_t* place = nullptr;
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

/// to[t, :] = sum over s < top_k, in this order, of weight[t, s] * from[row[t, s], :], where row is not -1,
/// in float32, rounded once. `from` is dense.
struct ReduceRowsParams {
  DType dtype = DType::kBFloat16;  ///< kBFloat16 or kFloat16
  const std::int32_t* row = nullptr;
  const float* weight = nullptr;
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

}  // namespace flashoverlap::cuda

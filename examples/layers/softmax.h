// The softmax of attention's scores, row by row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flashoverlap/dtype.h"

namespace flashoverlap::layers {

struct SoftmaxParams {
  DType dtype = DType::kBFloat16;  ///< Of the weights: bf16 or f16.
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t ld = 0;            ///< Of both matrices, in elements.
  float scale = 1;                ///< > 0
  const float* scores = nullptr;  ///< [rows, cols]
  void* weights = nullptr;        ///< [rows, cols]: softmax(scale * scores)
};

/// Puts it into `stream`.
void launch_softmax(const SoftmaxParams& params, cudaStream_t stream);

/// Loads the kernels, since one that is loaded behind a stream that waits would hang.
void load_softmax_kernels();

}  // namespace flashoverlap::layers

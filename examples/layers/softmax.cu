#include "softmax.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/element.cuh"

namespace flashoverlap::layers {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Of the block's values, in every thread. `of_warps` is free again behind it.
template <class Reduce>
__device__ __forceinline__ float reduce_block(float value, Reduce reduce, float (&of_warps)[kWarps]) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = reduce(value, __shfl_xor_sync(~0U, value, lanes));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) value = reduce(value, of_warps[warp]);
  __syncthreads();
  return value;
}

// One block a row. A row of scores is read three times, but only the first time from far away.
template <class Element>
__global__ void __launch_bounds__(kThreads) softmax_kernel(const __grid_constant__ SoftmaxParams params) {
  __shared__ float of_warps[kWarps];
  for (std::int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const float* const scores = params.scores + row * params.ld;
    auto* const weights = static_cast<Element*>(params.weights) + row * params.ld;
    float largest = -INFINITY;
    for (std::int64_t col = threadIdx.x; col < params.cols; col += kThreads)
      largest = fmaxf(largest, scores[col]);
    largest = reduce_block(largest, Max{}, of_warps);
    float total = 0;
    for (std::int64_t col = threadIdx.x; col < params.cols; col += kThreads)
      total += __expf(params.scale * (scores[col] - largest));
    total = reduce_block(total, Sum{}, of_warps);
    for (std::int64_t col = threadIdx.x; col < params.cols; col += kThreads)
      weights[col] = cuda::from_float<Element>(__expf(params.scale * (scores[col] - largest)) / total);
  }
}

auto kernel_of(DType dtype) {
  return dtype == DType::kFloat16 ? softmax_kernel<__half> : softmax_kernel<__nv_bfloat16>;
}

}  // namespace

void launch_softmax(const SoftmaxParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return;
  constexpr std::int64_t kMostBlocks = 1 << 20;
  const auto blocks = static_cast<unsigned>(std::min(params.rows, kMostBlocks));
  kernel_of(params.dtype)<<<blocks, kThreads, 0, stream>>>(params);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void load_softmax_kernels() {
  cudaFuncAttributes attributes;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
    FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel_of(dtype)));
}

}  // namespace flashoverlap::layers

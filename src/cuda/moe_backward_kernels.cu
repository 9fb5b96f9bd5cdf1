// Passes of the backward of a mixture-of-experts layer.
#include "moe_kernels.h"
#include "moe_rows.cuh"

namespace flashoverlap::cuda {
namespace {

// The derivative of `activate`.
__device__ __forceinline__ float slope(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone:
      return 1.0F;
    case Activation::kRelu:
      return x > 0.0F ? 1.0F : 0.0F;
    case Activation::kGelu: {
      constexpr float kInverseRootOf2Pi = 0.39894228040143268F;
      const float density = __expf(-0.5F * x * x) * kInverseRootOf2Pi;
      return 0.5F * (1.0F + erff(x * 0.70710678118654752F)) + x * density;
    }
    case Activation::kSilu: {
      const float s = __fdividef(1.0F, 1.0F + __expf(-x));
      return s + x * s * (1.0F - s);
    }
  }
  return 0.0F;
}

// One thread a word of the activated row.
template <class Element, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    activate_backward_kernel(const __grid_constant__ ActivateBackwardParams params) {
  using Word = Word<Element, kAligned>;
  const std::int64_t words = params.cols / Word::kElements;
  const std::int64_t from_words = params.gated ? 2 * words : words;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kRowThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
       i < params.rows * words; i += step) {
    const std::int64_t at = i / words * from_words + i % words;
    float before[Word::kElements];
    float gradient[Word::kElements];
    Word::load(params.from, at, before);
    Word::load(params.gradient, i, gradient);
    float by_before[Word::kElements];
#pragma unroll
    for (int e = 0; e < Word::kElements; ++e) by_before[e] = slope(params.activation, before[e]);
    if (params.gated) {
      float up[Word::kElements];
      float by_up[Word::kElements];
      Word::load(params.from, at + words, up);
#pragma unroll
      for (int e = 0; e < Word::kElements; ++e) {
        by_up[e] = gradient[e] * activate(params.activation, before[e]);
        gradient[e] *= up[e];
      }
      Word::store(params.to_gradient, at + words, by_up);
    }
#pragma unroll
    for (int e = 0; e < Word::kElements; ++e) by_before[e] *= gradient[e];
    Word::store(params.to_gradient, at, by_before);
  }
}

constexpr int kSquare = 64;
// Odd, so that the elements of a column lie in different banks.
constexpr int kPitch = kSquare + 1;

/// Two neighbours of 16 bits, as memory has them.
struct Pair {
  std::uint16_t low, high;
};

// Reads elements col and col + 1 of a row, at once where kPairs (then both lie in the matrix or none).
template <bool kPairs>
__device__ __forceinline__ Pair load_pair(const std::uint16_t* row, std::int64_t col, std::int64_t cols) {
  if constexpr (kPairs) {
    if (col >= cols) return {};
    const std::uint32_t both = *reinterpret_cast<const std::uint32_t*>(row + col);
    return {static_cast<std::uint16_t>(both), static_cast<std::uint16_t>(both >> 16)};
  } else {
    return {col < cols ? row[col] : std::uint16_t{0}, col + 1 < cols ? row[col + 1] : std::uint16_t{0}};
  }
}

template <bool kPairs>
__device__ __forceinline__ void store_pair(std::uint16_t* row, std::int64_t col, std::int64_t cols,
                                           Pair pair) {
  if constexpr (kPairs) {
    if (col < cols)
      *reinterpret_cast<std::uint32_t*>(row + col) = pair.low | static_cast<std::uint32_t>(pair.high) << 16;
  } else {
    if (col < cols) row[col] = pair.low;
    if (col + 1 < cols) row[col + 1] = pair.high;
  }
}

// One block a square, a warp a row of it, a thread two neighbours.
template <bool kPairs>
__global__ void __launch_bounds__(kRowThreads)
    transpose_kernel(const __grid_constant__ TransposeParams params) {
  __shared__ std::uint16_t square[kSquare * kPitch];
  const std::int64_t across = divided(params.cols, kSquare);
  const std::int64_t squares = divided(params.rows, kSquare) * across;
  const int warp = threadIdx.x / 32;
  const int col = threadIdx.x % 32 * 2;
  for (std::int64_t i = blockIdx.x; i < params.count * squares; i += gridDim.x) {
    const std::int64_t matrix = i / squares * params.rows * params.cols;
    const std::int64_t row_begin = i % squares / across * kSquare;
    const std::int64_t col_begin = i % squares % across * kSquare;
    const auto* const from = static_cast<const std::uint16_t*>(params.from) + matrix;
    auto* const to = static_cast<std::uint16_t*>(params.to) + matrix;
    for (int row = warp; row < kSquare && row_begin + row < params.rows; row += kRowWarps) {
      const Pair pair =
          load_pair<kPairs>(from + (row_begin + row) * params.cols, col_begin + col, params.cols);
      square[row * kPitch + col] = pair.low;
      square[row * kPitch + col + 1] = pair.high;
    }
    __syncthreads();
    for (int row = warp; row < kSquare && col_begin + row < params.cols; row += kRowWarps) {
      store_pair<kPairs>(to + (col_begin + row) * params.rows, row_begin + col, params.rows,
                         {square[col * kPitch + row], square[(col + 1) * kPitch + row]});
    }
    __syncthreads();
  }
}

// One warp a slot.
template <class Element, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    weight_gradient_kernel(const __grid_constant__ WeightGradientParams params) {
  using Word = Word<Element, kAligned>;
  const std::int64_t words = params.cols / Word::kElements;
  const std::int64_t lane = threadIdx.x % 32;
  for (std::int64_t slot = first_row(); slot < params.tokens * params.top_k; slot += row_step()) {
    const std::int64_t row = params.row[slot];
    const std::int64_t token = slot / params.top_k * (params.out_gradient_ld / Word::kElements);
    float sum = 0;
    for (std::int64_t word = lane; row >= 0 && word < words; word += 32) {
      float gradient[Word::kElements];
      float result[Word::kElements];
      Word::load(params.out_gradient, token + word, gradient);
      Word::load(params.results, row * words + word, result);
#pragma unroll
      for (int e = 0; e < Word::kElements; ++e) sum += gradient[e] * result[e];
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, other);
    if (lane == 0) params.gradient[slot] = sum;
  }
}

bool is_aligned_to_pairs(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(std::uint32_t) == 0;
}

}  // namespace

void launch_activate_backward(const ActivateBackwardParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return;
  const bool aligned = params.cols % kVectorElements == 0 && is_aligned(params.from) &&
                       is_aligned(params.gradient) && is_aligned(params.to_gradient);
  const std::int64_t words = params.rows * params.cols / (aligned ? kVectorElements : 1);
  with_element(params.dtype, [&](auto element) {
    using Element = decltype(element);
    const auto kernel =
        aligned ? activate_backward_kernel<Element, true> : activate_backward_kernel<Element, false>;
    kernel<<<blocks_for(divided(words, kRowThreads)), kRowThreads, 0, stream>>>(params);
  });
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_transpose(const TransposeParams& params, cudaStream_t stream) {
  const std::int64_t squares = params.count * divided(params.rows, kSquare) * divided(params.cols, kSquare);
  if (squares == 0) return;
  const bool pairs = params.rows % 2 == 0 && params.cols % 2 == 0 && is_aligned_to_pairs(params.from) &&
                     is_aligned_to_pairs(params.to);
  const auto kernel = pairs ? transpose_kernel<true> : transpose_kernel<false>;
  kernel<<<blocks_for(squares), kRowThreads, 0, stream>>>(params);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_weight_gradient(const WeightGradientParams& params, cudaStream_t stream) {
  if (params.tokens == 0) return;
  const bool aligned = params.cols % kVectorElements == 0 && params.out_gradient_ld % kVectorElements == 0 &&
                       is_aligned(params.out_gradient) && is_aligned(params.results);
  with_element(params.dtype, [&](auto element) {
    using Element = decltype(element);
    const auto kernel =
        aligned ? weight_gradient_kernel<Element, true> : weight_gradient_kernel<Element, false>;
    kernel<<<blocks_for(divided(params.tokens * params.top_k, kRowWarps)), kRowThreads, 0, stream>>>(params);
  });
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void load_moe_backward_kernels() {
  cudaFuncAttributes attributes;
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, transpose_kernel<true>));
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, transpose_kernel<false>));
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    with_element(dtype, [&](auto element) {
      using Element = decltype(element);
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, activate_backward_kernel<Element, true>));
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, activate_backward_kernel<Element, false>));
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, weight_gradient_kernel<Element, true>));
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, weight_gradient_kernel<Element, false>));
    });
  }
}

}  // namespace flashoverlap::cuda

#include "moe_kernels.h"

#include "moe_rows.cuh"

namespace flashoverlap::cuda {
namespace {

// Element: 16 bytes where everything is aligned to them, else an element.
template <class Element>
__global__ void __launch_bounds__(kRowThreads)
    gather_rows_kernel(const __grid_constant__ GatherRowsParams params) {
  constexpr int kElements = sizeof(Element) / 2;
  constexpr int kAhead = 4;
  const std::int64_t words = params.cols / kElements;
  const std::int64_t lane = threadIdx.x % 32;
  for (std::int64_t row = first_row(); row < params.rows; row += row_step()) {
    const std::int32_t source = params.source[row];
    const std::int64_t place = params.place == nullptr ? row : params.place[row];
    auto* const to = static_cast<Element*>(params.to) + place * words;
    const auto* const from =
        static_cast<const Element*>(params.from) + source / params.top_k * (params.from_ld / kElements);
    for (std::int64_t begin = lane; begin < words; begin += 32 * kAhead) {
      Element loaded[kAhead] = {};
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (source >= 0 && begin + 32 * a < words) loaded[a] = from[begin + 32 * a];
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (begin + 32 * a < words) to[begin + 32 * a] = loaded[a];
      }
    }
  }
}

template <class Element, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    gather_weighted_rows_kernel(const __grid_constant__ GatherRowsParams params) {
  using Word = Word<Element, kAligned>;
  const std::int64_t words = params.cols / Word::kElements;
  for (std::int64_t row = first_row(); row < params.rows; row += row_step()) {
    const std::int32_t source = params.source[row];
    const std::int64_t to = params.place[row] * words;
    const std::int64_t from = source / params.top_k * (params.from_ld / Word::kElements);
    const float weight = source < 0 ? 0.0F : params.weight[source];
    for (std::int64_t word = threadIdx.x % 32; word < words; word += 32) {
      float values[Word::kElements] = {};
      if (source >= 0) Word::load(params.from, from + word, values);
#pragma unroll
      for (float& value : values) value *= weight;
      Word::store(params.to, to + word, values);
    }
  }
}

// One thread a word.
template <class Element, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    activate_rows_kernel(const __grid_constant__ ActivateRowsParams params) {
  using Word = Word<Element, kAligned>;
  const std::int64_t words = params.cols / Word::kElements;
  const std::int64_t from_words = params.gated ? 2 * words : words;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kRowThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
       i < params.rows * words; i += step) {
    const std::int64_t at = i / words * from_words + i % words;
    float values[Word::kElements];
    Word::load(params.from, at, values);
    if (params.activation != Activation::kNone) {
#pragma unroll
      for (float& value : values) value = activate(params.activation, value);
    }
    if (params.gated) {
      float up[Word::kElements];
      Word::load(params.from, at + words, up);
#pragma unroll
      for (int e = 0; e < Word::kElements; ++e) values[e] *= up[e];
    }
    Word::store(params.to, i, values);
  }
}

template <class Element, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    reduce_rows_kernel(const __grid_constant__ ReduceRowsParams params) {
  using Word = Word<Element, kAligned>;
  const std::int64_t words = params.cols / Word::kElements;
  for (std::int64_t token = first_row(); token < params.tokens; token += row_step()) {
    const std::int64_t first_slot = token * params.top_k;
    const std::int64_t to = token * (params.to_ld / Word::kElements);
    for (std::int64_t word = threadIdx.x % 32; word < words; word += 32) {
      float sums[Word::kElements] = {};
      for (std::int64_t slot = first_slot; slot < first_slot + params.top_k; ++slot) {
        const std::int64_t row = params.row[slot];
        if (row < 0) continue;
        const float weight = params.weight == nullptr ? 1.0F : params.weight[slot];
        float values[Word::kElements];
        Word::load(params.from, row * words + word, values);
#pragma unroll
        for (int e = 0; e < Word::kElements; ++e) sums[e] += weight * values[e];
      }
      Word::store(params.to, to + word, sums);
    }
  }
}

}  // namespace

void launch_gather_rows(const GatherRowsParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return;
  const bool aligned = params.cols % kVectorElements == 0 && params.from_ld % kVectorElements == 0 &&
                       is_aligned(params.from) && is_aligned(params.to);
  const int blocks = blocks_for(divided(params.rows, kRowWarps));
  if (params.weight == nullptr) {
    const auto kernel = aligned ? gather_rows_kernel<uint4> : gather_rows_kernel<std::uint16_t>;
    kernel<<<blocks, kRowThreads, 0, stream>>>(params);
  } else {
    with_element(params.dtype, [&](auto element) {
      using Element = decltype(element);
      const auto kernel =
          aligned ? gather_weighted_rows_kernel<Element, true> : gather_weighted_rows_kernel<Element, false>;
      kernel<<<blocks, kRowThreads, 0, stream>>>(params);
    });
  }
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_activate_rows(const ActivateRowsParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return;
  const bool aligned = params.cols % kVectorElements == 0 && is_aligned(params.from) && is_aligned(params.to);
  const std::int64_t words = params.rows * params.cols / (aligned ? kVectorElements : 1);
  with_element(params.dtype, [&](auto element) {
    using Element = decltype(element);
    const auto kernel = aligned ? activate_rows_kernel<Element, true> : activate_rows_kernel<Element, false>;
    kernel<<<blocks_for(divided(words, kRowThreads)), kRowThreads, 0, stream>>>(params);
  });
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_reduce_rows(const ReduceRowsParams& params, cudaStream_t stream) {
  if (params.tokens == 0 || params.cols == 0) return;
  const bool aligned = params.cols % kVectorElements == 0 && params.to_ld % kVectorElements == 0 &&
                       is_aligned(params.from) && is_aligned(params.to);
  with_element(params.dtype, [&](auto element) {
    using Element = decltype(element);
    const auto kernel = aligned ? reduce_rows_kernel<Element, true> : reduce_rows_kernel<Element, false>;
    kernel<<<blocks_for(divided(params.tokens, kRowWarps)), kRowThreads, 0, stream>>>(params);
  });
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void load_moe_kernels() {
  cudaFuncAttributes attributes;
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, gather_rows_kernel<uint4>));
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, gather_rows_kernel<std::uint16_t>));
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    with_element(dtype, [&](auto element) {
      using Element = decltype(element);
      for (const auto kernel :
           {gather_weighted_rows_kernel<Element, true>, gather_weighted_rows_kernel<Element, false>}) {
        FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
      }
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, activate_rows_kernel<Element, true>));
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, activate_rows_kernel<Element, false>));
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reduce_rows_kernel<Element, true>));
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reduce_rows_kernel<Element, false>));
    });
  }
  load_moe_backward_kernels();
}

}  // namespace flashoverlap::cuda

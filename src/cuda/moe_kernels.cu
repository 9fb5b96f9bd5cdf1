#include "moe_kernels.h"

#include <algorithm>

#include "check.h"
#include "element.cuh"

namespace flashoverlap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// A block takes whole rows, so that a row's table entry is read once for all of its elements.
__device__ __forceinline__ std::int64_t first_row() {
  return static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}
__device__ __forceinline__ std::int64_t row_step() {
  return static_cast<std::int64_t>(gridDim.x) * kWarps;
}

// One warp a row. Word: 16 bytes where everything is aligned to them, else an element.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ GatherRowsParams params) {
  constexpr int kElements = sizeof(Word) / 2;
  constexpr int kAhead = 4;
  const std::int64_t words = params.cols / kElements;
  const std::int64_t lane = threadIdx.x % 32;
  for (std::int64_t row = first_row(); row < params.rows; row += row_step()) {
    const std::int32_t token = params.token[row];
    auto* const to = static_cast<Word*>(params.to) + params.place[row] * words;
    const auto* const from = static_cast<const Word*>(params.from) + token * (params.from_ld / kElements);
    for (std::int64_t begin = lane; begin < words; begin += 32 * kAhead) {
      Word loaded[kAhead] = {};
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (token >= 0 && begin + 32 * a < words) loaded[a] = from[begin + 32 * a];
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (begin + 32 * a < words) to[begin + 32 * a] = loaded[a];
      }
    }
  }
}

// One thread a vector, or an element.
template <class Element, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    activate_rows_kernel(const __grid_constant__ ActivateRowsParams params) {
  constexpr int kElements = kAligned ? kVectorElements : 1;
  const std::int64_t words = params.cols / kElements;
  const std::int64_t from_words = params.gated ? 2 * words : words;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < params.rows * words; i += step) {
    const std::int64_t at = i / words * from_words + i % words;
    if constexpr (kAligned) {
      const auto* const from = static_cast<const Vector<Element>*>(params.from);
      float values[kVectorElements];
      from[at].unpack(values);
      activate(params.activation, values);
      if (params.gated) {
        float up[kVectorElements];
        from[at + words].unpack(up);
#pragma unroll
        for (int e = 0; e < kVectorElements; ++e) values[e] *= up[e];
      }
      static_cast<Vector<Element>*>(params.to)[i] = Vector<Element>::pack(values);
    } else {
      const auto* const from = static_cast<const Element*>(params.from);
      float value = activate(params.activation, to_float(from[at]));
      if (params.gated) value *= to_float(from[at + words]);
      static_cast<Element*>(params.to)[i] = from_float<Element>(value);
    }
  }
}

// One warp a token.
template <class Element, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    reduce_rows_kernel(const __grid_constant__ ReduceRowsParams params) {
  constexpr int kElements = kAligned ? kVectorElements : 1;
  const std::int64_t words = params.cols / kElements;
  for (std::int64_t token = first_row(); token < params.tokens; token += row_step()) {
    const std::int32_t* const rows = params.row + token * params.top_k;
    const float* const weights = params.weight + token * params.top_k;
    for (std::int64_t word = threadIdx.x % 32; word < words; word += 32) {
      float sums[kElements] = {};
      for (std::int32_t slot = 0; slot < params.top_k; ++slot) {
        const std::int64_t row = rows[slot];
        if (row < 0) continue;
        if constexpr (kAligned) {
          float values[kVectorElements];
          static_cast<const Vector<Element>*>(params.from)[row * words + word].unpack(values);
#pragma unroll
          for (int e = 0; e < kElements; ++e) sums[e] += weights[slot] * values[e];
        } else {
          sums[0] += weights[slot] * to_float(static_cast<const Element*>(params.from)[row * words + word]);
        }
      }
      if constexpr (kAligned) {
        static_cast<Vector<Element>*>(params.to)[token * (params.to_ld / kElements) + word] =
            Vector<Element>::pack(sums);
      } else {
        static_cast<Element*>(params.to)[token * params.to_ld + word] = from_float<Element>(sums[0]);
      }
    }
  }
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

// Enough blocks to fill any device; the loops take the rest.
int blocks_for(std::int64_t work) {
  constexpr std::int64_t kMostBlocks = 1024;
  return static_cast<int>(std::clamp<std::int64_t>(work, 1, kMostBlocks));
}

template <class Function>
void with_element(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kBFloat16:
      return function(__nv_bfloat16{});
    case DType::kFloat16:
      return function(__half{});
    case DType::kFloat32:
      break;
  }
  throw_bad_argument("rows of experts on a GPU are bf16 or f16");
}

std::int64_t divided(std::int64_t value, std::int64_t by) {
  return (value + by - 1) / by;
}

}  // namespace

void launch_gather_rows(const GatherRowsParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return;
  const bool aligned = params.cols % kVectorElements == 0 && params.from_ld % kVectorElements == 0 &&
                       is_aligned(params.from) && is_aligned(params.to);
  const auto kernel = aligned ? gather_rows_kernel<uint4> : gather_rows_kernel<std::uint16_t>;
  kernel<<<blocks_for(divided(params.rows, kWarps)), kThreads, 0, stream>>>(params);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_activate_rows(const ActivateRowsParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return;
  const bool aligned = params.cols % kVectorElements == 0 && is_aligned(params.from) && is_aligned(params.to);
  const std::int64_t words = params.rows * params.cols / (aligned ? kVectorElements : 1);
  with_element(params.dtype, [&](auto element) {
    using Element = decltype(element);
    const auto kernel = aligned ? activate_rows_kernel<Element, true> : activate_rows_kernel<Element, false>;
    kernel<<<blocks_for(divided(words, kThreads)), kThreads, 0, stream>>>(params);
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
    kernel<<<blocks_for(divided(params.tokens, kWarps)), kThreads, 0, stream>>>(params);
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
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, activate_rows_kernel<Element, true>));
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, activate_rows_kernel<Element, false>));
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reduce_rows_kernel<Element, true>));
      FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reduce_rows_kernel<Element, false>));
    });
  }
}

}  // namespace flashoverlap::cuda

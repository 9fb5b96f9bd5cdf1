// How kernels copy between ranks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashoverlap::cuda {

constexpr int kPeerThreads = 512;

// Loads that a thread has under way at once: at the rate of a link its latency holds many.
constexpr int kLoadsAhead = 8;

// kLoadsAhead words, `step` apart, as far as there are any: all loads before the first store.
template <class Word>
__device__ __forceinline__ void copy_ahead(Word* to, const Word* from, std::int64_t first, std::int64_t step,
                                           std::int64_t words) {
  Word loaded[kLoadsAhead];
#pragma unroll
  for (int a = 0; a < kLoadsAhead; ++a) {
    if (first + a * step < words) loaded[a] = from[first + a * step];
  }
#pragma unroll
  for (int a = 0; a < kLoadsAhead; ++a) {
    if (first + a * step < words) to[first + a * step] = loaded[a];
  }
}

// By all threads of a grid of kPeerThreads a block.
template <class Word>
__device__ __forceinline__ void copy_by_grid(Word* to, const Word* from, std::int64_t words) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kPeerThreads;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kPeerThreads + threadIdx.x;
  for (std::int64_t w = first; w < words; w += kLoadsAhead * step) copy_ahead(to, from, w, step, words);
}

}  // namespace flashoverlap::cuda

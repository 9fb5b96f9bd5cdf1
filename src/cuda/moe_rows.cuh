// What the kernels over rows of experts share: who takes which row, elements as float32, launches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "check.h"
#include "element.cuh"

namespace flashoverlap::cuda {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / 32;

// One warp a row, so that a row's table entry is read once for all of its elements.
__device__ __forceinline__ std::int64_t first_row() {
  return static_cast<std::int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
}
__device__ __forceinline__ std::int64_t row_step() {
  return static_cast<std::int64_t>(gridDim.x) * kRowWarps;
}

/// What a thread loads and stores at once: 16 bytes where everything is aligned to them, else an element.
template <class Element, bool kAligned>
struct Word {
  static constexpr int kElements = kAligned ? kVectorElements : 1;

  static __device__ __forceinline__ void load(const void* from, std::int64_t word,
                                              float (&values)[kElements]) {
    if constexpr (kAligned) {
      static_cast<const Vector<Element>*>(from)[word].unpack(values);
    } else {
      values[0] = to_float(static_cast<const Element*>(from)[word]);
    }
  }
  static __device__ __forceinline__ void store(void* to, std::int64_t word,
                                               const float (&values)[kElements]) {
    if constexpr (kAligned) {
      static_cast<Vector<Element>*>(to)[word] = Vector<Element>::pack(values);
    } else {
      static_cast<Element*>(to)[word] = from_float<Element>(values[0]);
    }
  }
};

inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

constexpr std::int64_t divided(std::int64_t value, std::int64_t by) {
  return (value + by - 1) / by;
}

// Enough blocks to fill any device; the loops take the rest.
inline int blocks_for(std::int64_t work) {
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

}  // namespace flashoverlap::cuda

// Elements of 16 bits as float32 and back, one by one and in vectors, and the activations.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "flashoverlap/executor.h"

namespace flashoverlap::cuda {

constexpr int kVectorElements = 8;  // 16 bytes

template <class Element>
__device__ __forceinline__ float to_float(Element x) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half2float(x);
  } else {
    return __bfloat162float(x);
  }
}

template <class Element>
__device__ __forceinline__ Element from_float(float x) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

template <class Element>
struct Vector {
  uint4 bits;
  // `values`: kVectorElements of them.
  __device__ __forceinline__ void unpack(float* values) const {
    const auto* elements = reinterpret_cast<const Element*>(&bits);
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) values[i] = to_float(elements[i]);
  }
  static __device__ __forceinline__ Vector pack(const float* values) {
    Vector vector;
    auto* elements = reinterpret_cast<Element*>(&vector.bits);
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) elements[i] = from_float<Element>(values[i]);
    return vector;
  }
};

__device__ __forceinline__ float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0.0F ? 0.0F : x;  // not fmaxf, which would hide a NaN
    case Activation::kGelu:
      return 0.5F * x * (1.0F + erff(x * 0.70710678118654752F));
    case Activation::kSilu:
      return __fdividef(x, 1.0F + __expf(-x));
  }
  return x;
}

template <Activation kActivation, int kCount>
__device__ __forceinline__ void activate_each(float (&values)[kCount]) {
#pragma unroll
  for (float& value : values) value = activate(kActivation, value);
}

// The activation is the same for the whole grid, so it costs a branch for all values and spares a kernel per
// activation.
template <int kCount>
__device__ __forceinline__ void activate(Activation activation, float (&values)[kCount]) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return activate_each<Activation::kRelu>(values);
    case Activation::kGelu:
      return activate_each<Activation::kGelu>(values);
    case Activation::kSilu:
      return activate_each<Activation::kSilu>(values);
  }
}

}  // namespace flashoverlap::cuda

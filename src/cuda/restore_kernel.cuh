// The restore kernel: one block per row (and per stretch of columns, where no norm needs the whole row at once).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "restore.h"

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
  __device__ __forceinline__ void unpack(float (&values)[kVectorElements]) const {
    const auto* elements = reinterpret_cast<const Element*>(&bits);
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) values[i] = to_float(elements[i]);
  }
  static __device__ __forceinline__ Vector pack(const float (&values)[kVectorElements]) {
    Vector vector;
    auto* elements = reinterpret_cast<Element*>(&vector.bits);
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) elements[i] = from_float<Element>(values[i]);
    return vector;
  }
};

// Loads and stores of up to 8 neighbouring elements: one access where aligned, element by element otherwise.
template <class Element, bool kAligned>
__device__ __forceinline__ void load_elements(const Element* from, int count, float (&values)[kVectorElements]) {
  if constexpr (kAligned) {
    Vector<Element>{__ldg(reinterpret_cast<const uint4*>(from))}.unpack(values);
  } else {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) values[i] = i < count ? to_float(from[i]) : 0.0F;
  }
}
template <class Element, bool kAligned>
__device__ __forceinline__ void store_elements(Element* to, int count, const float (&values)[kVectorElements]) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(to) = Vector<Element>::pack(values).bits;
  } else {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      if (i < count) to[i] = from_float<Element>(values[i]);
    }
  }
}

// The switch is the same for the whole grid, so it costs a branch per vector and spares a kernel per activation.
__device__ __forceinline__ void activate(Activation activation, float (&values)[kVectorElements]) {
#pragma unroll
  for (int i = 0; i < kVectorElements; ++i) {
    float& x = values[i];
    switch (activation) {
      case Activation::kNone: break;
      case Activation::kRelu: x = x < 0.0F ? 0.0F : x; break;  // not fmaxf, which would hide a NaN
      case Activation::kGelu: x = 0.5F * x * (1.0F + erff(x * 0.70710678118654752F)); break;
      case Activation::kSilu: x = x / (1.0F + __expf(-x)); break;
    }
  }
}

// Where the elements of one restored row lie in the source.
struct SourceRow {
  __device__ SourceRow(const RestoreParams& params, std::int64_t row) : params_(params), row_(row) {
    if (params.restore.band_of_row == nullptr) return;
    band_ = params.restore.bands[__ldg(params.restore.band_of_row + row)];
  }
  __device__ __forceinline__ std::int64_t at(int col) const {
    if (params_.restore.band_of_row == nullptr) return row_ * params_.source_ld + col;
    int index = 0;
    if (band_.piece_cols > 0) {
      index = min(col / band_.piece_cols, band_.num_pieces - 1);
    } else {
      while (index + 1 < band_.num_pieces && params_.restore.pieces[band_.first_piece + index + 1].col_begin <= col) ++index;
    }
    const DevicePiece piece = params_.restore.pieces[band_.first_piece + index];
    return piece.offset + (row_ - band_.row_begin) * piece.cols + (col - piece.col_begin);
  }

 private:
  const RestoreParams& params_;
  std::int64_t row_;
  DeviceBand band_{};
};

template <class Element, bool kAligned>
__device__ __forceinline__ void load_restored(const Element* source, const SourceRow& row, int col, int count,
                                              float (&values)[kVectorElements]) {
  if constexpr (kAligned) {
    load_elements<Element, true>(source + row.at(col), count, values);
  } else {
    for (int i = 0; i < kVectorElements; ++i) values[i] = i < count ? to_float(source[row.at(col + i)]) : 0.0F;
  }
}

// Sum over the block, the same in every thread.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float partial[32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffU, value, step);
  const int warps = static_cast<int>(blockDim.x / 32);
  if (warps == 1) return value;
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = static_cast<int>(threadIdx.x % 32) < warps ? partial[threadIdx.x % 32] : 0.0F;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffU, value, step);
  return value;
}

// Thread t has vectors t, t + threads, ... of its block's stretch of the row: kVectors of them, all in registers.
template <class Element, bool kNorm, bool kAligned, int kVectors>
__global__ void restore_kernel(const __grid_constant__ RestoreParams params) {
  const std::int64_t row = params.row_begin + blockIdx.x;
  const int n = static_cast<int>(params.n);
  const int first = static_cast<int>(blockIdx.y * blockDim.x) * kVectors + static_cast<int>(threadIdx.x);
  const auto col_of = [&](int v) { return (first + v * static_cast<int>(blockDim.x)) * kVectorElements; };
  const auto* source = static_cast<const Element*>(params.source);
  const Epilogue& epilogue = params.epilogue;
  const SourceRow source_row(params, row);

  float values[kVectors][kVectorElements];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (col_of(v) < n) load_restored<Element, kAligned>(source, source_row, col_of(v), n - col_of(v), values[v]);
  }
  float squares = 0.0F;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int col = col_of(v);
    if (col >= n) continue;
    const int count = n - col;
    float operand[kVectorElements];
    if (epilogue.bias != nullptr) {
      load_elements<Element, kAligned>(static_cast<const Element*>(epilogue.bias) + col, count, operand);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) values[v][i] += operand[i];
    }
    activate(epilogue.activation, values[v]);
    if (epilogue.residual != nullptr) {
      load_elements<Element, kAligned>(static_cast<const Element*>(epilogue.residual) + row * epilogue.residual_ld + col, count,
                                       operand);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) values[v][i] += operand[i];
    }
    if (epilogue.residual_out != nullptr) {
      store_elements<Element, kAligned>(static_cast<Element*>(epilogue.residual_out) + row * epilogue.residual_out_ld + col, count,
                                        values[v]);
    }
    if constexpr (kNorm) {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) squares += kAligned || i < count ? values[v][i] * values[v][i] : 0.0F;
    }
  }
  float scale = 1.0F;
  if constexpr (kNorm) scale = rsqrtf(block_sum(squares) / static_cast<float>(n) + epilogue.rms_norm_eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int col = col_of(v);
    if (col >= n) continue;
    if constexpr (kNorm) {
      float weight[kVectorElements];
      load_elements<Element, kAligned>(static_cast<const Element*>(epilogue.rms_norm_weight) + col, n - col, weight);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) values[v][i] *= scale * weight[i];
    }
    store_elements<Element, kAligned>(static_cast<Element*>(params.out) + row * params.ldo + col, n - col, values[v]);
  }
}

}  // namespace flashoverlap::cuda

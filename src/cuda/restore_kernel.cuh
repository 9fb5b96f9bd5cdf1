// The restore kernels: one for operands whose rows are aligned to 16 bytes, one for all others.
#pragma once

#include <cstdint>
#include <cstring>

#include "element.cuh"
#include "ptx.cuh"
#include "restore.h"

namespace flashoverlap::cuda {

__device__ __forceinline__ DeviceRow load_row(const DeviceRestore& restore, std::int64_t row) {
  const int2 raw = __ldg(reinterpret_cast<const int2*>(restore.rows + row));
  return {raw.x, raw.y};
}

__device__ __forceinline__ DevicePiece load_piece(const DeviceRestore& restore, int index) {
  const int4 raw = __ldg(reinterpret_cast<const int4*>(restore.pieces + index));
  DevicePiece piece;
  memcpy(&piece, &raw, sizeof piece);
  return piece;
}

// The piece of a row in which column `col` lies, where widths differ.
__device__ __forceinline__ DevicePiece search_piece(const DeviceRestore& restore, const DeviceRow& row,
                                                    int col) {
  for (int index = row.first_piece;; ++index) {
    const DevicePiece piece = load_piece(restore, index);
    if (col < piece.col_begin + piece.cols) return piece;
  }
}

__device__ __forceinline__ std::int64_t offset_in(const DevicePiece& piece, int row_in_band, int col) {
  return piece.offset + static_cast<std::int64_t>(row_in_band) * piece.cols + (col - piece.col_begin);
}

// Sum over the block, the same in every thread. `round` alternates between 0 and 1, so that a warp may be one
// sum ahead of the others.
__device__ __forceinline__ float block_sum(float value, int round) {
  __shared__ float partial[2][32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffU, value, step);
  const int warps = static_cast<int>(blockDim.x / 32);
  if (warps == 1) return value;
  if (threadIdx.x % 32 == 0) partial[round][threadIdx.x / 32] = value;
  __syncthreads();
  value = static_cast<int>(threadIdx.x % 32) < warps ? partial[round][threadIdx.x % 32] : 0.0F;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffU, value, step);
  return value;
}

__device__ __forceinline__ void add_to(float (&values)[kVectorElements],
                                       const float (&other)[kVectorElements]) {
#pragma unroll
  for (int i = 0; i < kVectorElements; ++i) values[i] += other[i];
}

// Vectors of 16 bytes. A thread has the same kVectors vectors of every row of its block, `threads` vectors
// apart. Sources and residual of the next kRowsAhead rows are under way to shared memory while a row is
// worked on, so that global memory never waits for the sum of squares. Where a row lies is looked up in two
// steps, one row apart: each step uses what an earlier iteration has loaded, so that no thread ever stands
// still for a look-up.
template <class Element, bool kNorm, bool kSums, int kVectors, int kRowsAhead>
class AlignedRows {
 public:
  static constexpr int kRowSlots = kRowsAhead + 1;

  __device__ AlignedRows(const RestoreParams& params, uint4* ring)
      : params_(params),
        ring_(ring),
        n_(static_cast<int>(params.n)),
        first_((static_cast<int>(blockIdx.y * blockDim.x) * kVectors + static_cast<int>(threadIdx.x)) *
               kVectorElements),
        end_(params.row_begin + params.rows) {}

  __device__ void run() {
    const Epilogue& epilogue = params_.epilogue;
    Vector<Element> weight[kVectors];
    if constexpr (kNorm) {
      for_each(
          [&](int v) { weight[v] = load(static_cast<const Element*>(epilogue.rms_norm_weight) + col(v)); });
    }
    const std::int64_t step = gridDim.x;
    std::int64_t row = params_.row_begin + blockIdx.x;
    if (is_restored()) {
      entry_ = load_row(params_.restore, row);
      find_pieces();
      if (row + step < end_) entry_ = load_row(params_.restore, row + step);
    }
    for (int ahead = 0; ahead < kRowsAhead; ++ahead) start_loads(row + ahead * step, ahead, step);
    for (int slot = 0, round = 0; row < end_; row += step, round ^= 1) {
      start_loads(row + kRowsAhead * step, (slot + kRowsAhead) % kRowSlots, step);
      // This thread reads only what it has loaded itself, so it needs no barrier.
      ptx::copy_async_wait_group<kRowsAhead>();
      float values[kVectors][kVectorElements];
      for_each([&](int v) { first_steps(row, v, slot, values[v]); });
      if constexpr (kNorm) normalise(values, weight, round);
      for_each(
          [&](int v) { store(static_cast<Element*>(params_.out) + row * params_.ldo + col(v), values[v]); });
      slot = slot + 1 == kRowSlots ? 0 : slot + 1;
    }
  }

 private:
  __device__ __forceinline__ int col(int v) const {
    return first_ + v * static_cast<int>(blockDim.x) * kVectorElements;
  }
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (col(v) < n_) body(v);
    }
  }
  static __device__ __forceinline__ Vector<Element> load(const Element* from) {
    return {__ldg(reinterpret_cast<const uint4*>(from))};
  }
  static __device__ __forceinline__ void store(Element* to, const float (&values)[kVectorElements]) {
    *reinterpret_cast<uint4*>(to) = Vector<Element>::pack(values).bits;
  }
  __device__ __forceinline__ int num_sources() const {
    return kSums ? params_.sums.count : 1;
  }
  __device__ __forceinline__ const Element* source(int s) const {
    return static_cast<const Element*>(kSums ? params_.sums.sources[s] : params_.source);
  }
  // `s` beyond the sources: the residual.
  __device__ __forceinline__ uint4* ring_slot(int slot, int s, int v) const {
    return ring_ + ((s * kRowSlots + slot) * kVectors + v) * blockDim.x + threadIdx.x;
  }

  __device__ __forceinline__ bool is_restored() const {
    return params_.restore.rows != nullptr;
  }

  // Starts the loads of `row`, and takes the next row's look-up a step on. Always ends a group of copies.
  __device__ __forceinline__ void start_loads(std::int64_t row, int slot, std::int64_t step) {
    if (row < end_) {
      if (is_restored()) {
        for_each([&](int v) { copy_sources(slot, v, offset_in(pieces_[v], row_in_band_, col(v))); });
        find_pieces();
        if (row + 2 * step < end_) entry_ = load_row(params_.restore, row + 2 * step);
      } else {
        for_each([&](int v) { copy_sources(slot, v, row * params_.source_ld + col(v)); });
      }
      if (params_.epilogue.residual != nullptr) {
        const auto* from =
            static_cast<const Element*>(params_.epilogue.residual) + row * params_.epilogue.residual_ld;
        for_each([&](int v) { ptx::copy_async<16>(ring_slot(slot, num_sources(), v), from + col(v), 16); });
      }
    }
    ptx::copy_async_commit_group();
  }
  __device__ __forceinline__ void copy_sources(int slot, int v, std::int64_t offset) const {
    for (int s = 0; s < num_sources(); ++s)
      ptx::copy_async<16>(ring_slot(slot, s, v), source(s) + offset, 16);
  }

  // The pieces of the row that entry_ describes.
  __device__ __forceinline__ void find_pieces() {
    row_in_band_ = entry_.row_in_band;
    if (params_.restore.piece_cols > 0) {
      for_each([&](int v) {
        pieces_[v] = load_piece(params_.restore, entry_.first_piece + col(v) / params_.restore.piece_cols);
      });
    } else {
      for_each([&](int v) { pieces_[v] = search_piece(params_.restore, entry_, col(v)); });
    }
  }

  // Sum, bias, activation, residual.
  __device__ __forceinline__ void first_steps(std::int64_t row, int v, int slot,
                                              float (&values)[kVectorElements]) const {
    const Epilogue& epilogue = params_.epilogue;
    float operand[kVectorElements];
    Vector<Element>{*ring_slot(slot, 0, v)}.unpack(values);
    for (int s = 1; s < num_sources(); ++s) {
      Vector<Element>{*ring_slot(slot, s, v)}.unpack(operand);
      add_to(values, operand);
    }
    if (epilogue.bias != nullptr) {
      load(static_cast<const Element*>(epilogue.bias) + col(v)).unpack(operand);
      add_to(values, operand);
    }
    activate(epilogue.activation, values);
    if (epilogue.residual != nullptr) {
      Vector<Element>{*ring_slot(slot, num_sources(), v)}.unpack(operand);
      add_to(values, operand);
    }
    if (epilogue.residual_out != nullptr) {
      store(static_cast<Element*>(epilogue.residual_out) + row * epilogue.residual_out_ld + col(v), values);
    }
  }

  __device__ __forceinline__ void normalise(float (&values)[kVectors][kVectorElements],
                                            const Vector<Element> (&weight)[kVectors], int round) const {
    float squares = 0.0F;
    for_each([&](int v) {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) squares += values[v][i] * values[v][i];
    });
    const float scale =
        rsqrtf(__fdividef(block_sum(squares, round), static_cast<float>(n_)) + params_.epilogue.rms_norm_eps);
    for_each([&](int v) {
      float factor[kVectorElements];
      weight[v].unpack(factor);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) values[v][i] *= scale * factor[i];
    });
  }

  const RestoreParams& params_;
  uint4* ring_;  // [sources, residual][kRowSlots][kVectors][threads]
  int n_;
  int first_;
  std::int64_t end_;
  DeviceRow entry_;               // of the row after the next to load
  int row_in_band_ = 0;           // of the next row to load
  DevicePiece pieces_[kVectors];  // of the next row to load
};

constexpr int kMaxThreads = 1024;

// The bound keeps a thread at 64 registers.
template <class Element, bool kNorm, bool kSums, int kVectors, int kRowsAhead>
__global__ void __launch_bounds__(kMaxThreads) restore_aligned(const __grid_constant__ RestoreParams params) {
  extern __shared__ uint4 ring[];
  AlignedRows<Element, kNorm, kSums, kVectors, kRowsAhead>(params, ring).run();
}

// Element by element, one block per row: for what the other kernel cannot take. With a norm the row is
// computed twice, since it need not fit the registers.
template <class Element>
class AnyRow {
 public:
  __device__ AnyRow(const RestoreParams& params, std::int64_t row) : params_(params), row_(row) {
    if (params.restore.rows != nullptr) entry_ = load_row(params.restore, row);
  }

  // Sum, bias, activation, residual.
  __device__ float value(int col) const {
    const Epilogue& epilogue = params_.epilogue;
    float x = sum_at(source_offset(col));
    if (epilogue.bias != nullptr) x += to_float(static_cast<const Element*>(epilogue.bias)[col]);
    x = activate(epilogue.activation, x);
    if (epilogue.residual != nullptr) {
      x += to_float(static_cast<const Element*>(epilogue.residual)[row_ * epilogue.residual_ld + col]);
    }
    return x;
  }

 private:
  __device__ float sum_at(std::int64_t offset) const {
    if (params_.sums.count == 0) return to_float(static_cast<const Element*>(params_.source)[offset]);
    float sum = 0.0F;
    for (int s = 0; s < params_.sums.count; ++s) {
      const float x = to_float(static_cast<const Element*>(params_.sums.sources[s])[offset]);
      sum = s == 0 ? x : sum + x;  // no 0 + x, which would lose the sign of -0
    }
    return sum;
  }
  __device__ std::int64_t source_offset(int col) const {
    if (params_.restore.rows == nullptr) return row_ * params_.source_ld + col;
    return offset_in(search_piece(params_.restore, entry_, col), entry_.row_in_band, col);
  }
  const RestoreParams& params_;
  std::int64_t row_;
  DeviceRow entry_{};
};

template <class Element, bool kNorm>
__global__ void restore_any(const __grid_constant__ RestoreParams params) {
  const Epilogue& epilogue = params.epilogue;
  const std::int64_t row = params.row_begin + blockIdx.x;
  const int n = static_cast<int>(params.n);
  const AnyRow<Element> source(params, row);
  float scale = 1.0F;
  if constexpr (kNorm) {
    float squares = 0.0F;
    for (int col = static_cast<int>(threadIdx.x); col < n; col += static_cast<int>(blockDim.x)) {
      const float x = source.value(col);
      squares += x * x;
    }
    // Also a barrier: `out` and `residual_out` may be the residual, which is read above.
    scale = rsqrtf(block_sum(squares, 0) / static_cast<float>(n) + epilogue.rms_norm_eps);
  }
  for (int col = static_cast<int>(threadIdx.x); col < n; col += static_cast<int>(blockDim.x)) {
    float x = source.value(col);
    if (epilogue.residual_out != nullptr) {
      static_cast<Element*>(epilogue.residual_out)[row * epilogue.residual_out_ld + col] =
          from_float<Element>(x);
    }
    if constexpr (kNorm) x *= scale * to_float(static_cast<const Element*>(epilogue.rms_norm_weight)[col]);
    static_cast<Element*>(params.out)[row * params.ldo + col] = from_float<Element>(x);
  }
}

}  // namespace flashoverlap::cuda

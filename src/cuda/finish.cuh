// The device side of what is done with a tile before it is stored.
#pragma once

#include <type_traits>

#include "element.cuh"
#include "finish.h"
#include "gate.cuh"
#include "row_store.cuh"
#include "tile_work.h"

namespace flashoverlap::cuda {

/// Tiles are stored as they are. Compiles to nothing.
struct NoFinish {
  struct Params {};
  static constexpr bool kChanges = false;
  static constexpr bool kAdds = false;
  __device__ NoFinish(const Params& /*params*/, int /*num_positions*/, int /*first*/, int /*step*/) {}
  __device__ void begin_tile(const TileWork& /*work*/) {}
};

// The first `cols` (at most 8) elements from `from` on, zeros behind them. Past the first cache: some of what
// is read here was written while this kernel ran.
__device__ __forceinline__ uint4 load_elements(const std::uint16_t* from, int cols) {
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  if (cols >= 8 && (address & 15) == 0) return __ldcg(reinterpret_cast<const uint4*>(from));
  std::uint32_t words[4] = {};
  if (cols >= 8 && (address & 3) == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __ldcg(reinterpret_cast<const std::uint32_t*>(from) + i);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < cols) words[i / 2] |= static_cast<std::uint32_t>(__ldcg(from + i)) << (16 * (i & 1));
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// The ends of the tiles of one walk over the schedule: positions first, first + step, … as in ScheduleWalk.
/// kAdds: some add what other ranks have sent.
template <bool kIsBf16, bool kAdds_>
class TileFinish {
  using Packed = Vector<std::conditional_t<kIsBf16, __nv_bfloat16, __half>>;
  using Gate = std::conditional_t<kAdds_, SliceGate<false>, NoGate>;

 public:
  using Params = DeviceFinish;
  static constexpr bool kChanges = true;
  static constexpr bool kAdds = kAdds_;

  __device__ TileFinish(const Params& params, int num_positions, int first, int step)
      : params_(params), gate_(params.gates, num_positions, first, step), next_(first), step_(step) {}

  /// Until the next tile of the walk, which is `work`, may be finished. By whole warps.
  __device__ __forceinline__ void begin_tile(const TileWork& work) {
    has_epilogue_ = has_epilogue_of(work);
    if constexpr (kAdds) {
      gate_.wait();
      offsets_ = params_.offsets + static_cast<std::int64_t>(next_) * params_.others;
      adds_ = params_.others > 0 && __ldg(offsets_) >= 0;
      next_ += step_;
    }
  }

  /// Whether the tile is stored otherwise than it was computed.
  [[nodiscard]] __device__ __forceinline__ bool changes() const { return adds() || has_epilogue_; }
  [[nodiscard]] __device__ __forceinline__ bool has_epilogue() const { return has_epilogue_; }
  [[nodiscard]] __device__ __forceinline__ bool has_epilogue_of(const TileWork& work) const {
    return params_.has_epilogue && work.kind == StoreKind::kInPlace;
  }
  /// Whether anything is added to the tile.
  [[nodiscard]] __device__ __forceinline__ bool adds() const { return kAdds && adds_; }

  [[nodiscard]] __device__ __forceinline__ int num_ranks() const { return params_.others + 1; }
  /// Whether `rank` is this one, whose part of the tile it has computed itself.
  [[nodiscard]] __device__ __forceinline__ bool is_own(int rank) const { return rank == params_.lower; }

  /// What another rank has sent of elements [col, col + 8) of row `row` of the tile.
  [[nodiscard]] __device__ __forceinline__ uint4 part(const TileWork& work, int row, int col,
                                                      int rank) const {
    return load_elements(address(work, row, col, rank), work.cols - col);
  }
  /// The same where the tile's parts `are_vectors`.
  [[nodiscard]] __device__ __forceinline__ uint4 part_vector(const TileWork& work, int row, int col,
                                                             int rank) const {
    return __ldcg(reinterpret_cast<const uint4*>(address(work, row, col, rank)));
  }
  /// Whether all 8 elements from every eighth column on are there, and lie as 16 bytes do.
  [[nodiscard]] __device__ __forceinline__ bool are_vectors(const TileWork& work) const {
    std::int64_t all =
        work.cols | static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(received()) / 2);
#pragma unroll 1
    for (int s = 0; s < params_.others; ++s) all |= __ldg(offsets_ + s);
    return all % kVectorElements == 0;
  }

  /// 8 elements of the sum, to which the ranks' parts are added in their order.
  class Sum {
   public:
    __device__ __forceinline__ Sum() { clear(); }
    __device__ __forceinline__ void add(const uint4& part) {
      float operand[kVectorElements];
      Packed{part}.unpack(operand);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) values_[i] += operand[i];
    }
    __device__ __forceinline__ uint4 take() {
      const uint4 bits = Packed::pack(values_).bits;
      clear();
      return bits;
    }

   private:
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (float& value : values_) value = -0.0F;  // 0 + x would lose the sign of -0
    }
    float values_[kVectorElements];
  };

  /// Of elements [col, col + 8) of row `row` of the tile; zeros where there is none.
  [[nodiscard]] __device__ __forceinline__ uint4 residual(const TileWork& work, int row, int col) const {
    if (params_.epilogue.residual == nullptr) return {};
    return load_elements(row_of(params_.epilogue.residual, params_.epilogue.residual_ld, work, row) + col,
                         work.cols - col);
  }
  /// The same of the bias, which all rows share.
  [[nodiscard]] __device__ __forceinline__ uint4 bias(const TileWork& work, int col) const {
    if (params_.epilogue.bias == nullptr) return {};
    return load_elements(static_cast<const std::uint16_t*>(params_.epilogue.bias) + work.col_begin + col,
                         work.cols - col);
  }

  /// The epilogue of vectors of kRows rows, one below the other: sums, rounded, become elements of the
  /// output.
  template <int kRows>
  __device__ __forceinline__ void complete(uint4 (&vectors)[kRows], const uint4& bias,
                                           const uint4 (&residual)[kRows]) const {
    const Epilogue& epilogue = params_.epilogue;
    float values[kRows * kVectorElements];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Packed{vectors[i]}.unpack(values + i * kVectorElements);
      if (epilogue.bias != nullptr) add_to(values + i * kVectorElements, bias);
    }
    activate(epilogue.activation, values);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (epilogue.residual != nullptr) add_to(values + i * kVectorElements, residual[i]);
      vectors[i] = Packed::pack(values + i * kVectorElements).bits;
    }
  }
  /// Stores what `complete` has made of elements [col, col + 8) of row `row` of the tile where the epilogue
  /// wants them besides.
  __device__ __forceinline__ void store_residual_out(const uint4& elements, const TileWork& work, int row,
                                                     int col) const {
    const Epilogue& epilogue = params_.epilogue;
    if (epilogue.residual_out == nullptr) return;
    const std::uint16_t* const to = row_of(epilogue.residual_out, epilogue.residual_out_ld, work, row);
    store_vector(const_cast<std::uint16_t*>(to) + col, elements, work.cols - col);
  }

 private:
  [[nodiscard]] __device__ __forceinline__ const std::uint16_t* received() const {
    return static_cast<const std::uint16_t*>(params_.received);
  }
  [[nodiscard]] __device__ __forceinline__ const std::uint16_t* address(const TileWork& work, int row,
                                                                        int col, int rank) const {
    const int other = rank < params_.lower ? rank : rank - 1;
    return received() + __ldg(offsets_ + other) + static_cast<std::int64_t>(row) * work.cols + col;
  }
  /// Of a matrix with the rows and columns of the output: row `row` of the tile, at its first column.
  static __device__ __forceinline__ const std::uint16_t* row_of(const void* matrix, std::int64_t ld,
                                                                const TileWork& work, int row) {
    return static_cast<const std::uint16_t*>(matrix) + (row_in_output(work) + row) * ld + work.col_begin;
  }
  static __device__ __forceinline__ void add_to(float* values, const uint4& bits) {
    float other[kVectorElements];
    Packed{bits}.unpack(other);
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) values[i] += other[i];
  }

  const Params& params_;
  Gate gate_;
  int next_;  // position of the tile after this one
  int step_;
  const std::int64_t* offsets_ = nullptr;
  bool adds_ = false;
  bool has_epilogue_ = false;
};

}  // namespace flashoverlap::cuda

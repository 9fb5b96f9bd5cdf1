// The device side of finish gates: what is done with a tile before it is stored.
#pragma once

#include <type_traits>

#include "element.cuh"
#include "finish.h"
#include "gate.cuh"
#include "tile_work.h"

namespace flashoverlap::cuda {

/// Tiles are stored as they are. Compiles to nothing.
struct NoFinish {
  struct Params {};
  static constexpr bool kAdds = false;
  __device__ NoFinish(const Params& /*params*/, int /*num_positions*/, int /*first*/, int /*step*/) {}
  __device__ void begin_tile() {}
};

// The first `cols` (at most 8) elements from `from` on, zeros behind them. Past the first cache: what is read
// here was written while this kernel ran.
__device__ __forceinline__ uint4 load_received(const std::uint16_t* from, int cols) {
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

/// The finish gates of one walk over the schedule: positions first, first + step, … as in ScheduleWalk.
template <bool kIsBf16>
class TileSum {
  using Packed = Vector<std::conditional_t<kIsBf16, __nv_bfloat16, __half>>;

 public:
  using Params = DeviceFinish;
  static constexpr bool kAdds = true;

  __device__ TileSum(const Params& params, int num_positions, int first, int step)
      : params_(params), gate_(params.gates, num_positions, first, step), next_(first), step_(step) {}

  /// Until the next tile of the walk may be added up. By whole warps.
  __device__ void begin_tile() {
    gate_.wait();
    offsets_ = params_.offsets + static_cast<std::int64_t>(next_) * params_.others;
    adds_ = params_.others > 0 && __ldg(offsets_) >= 0;
    next_ += step_;
  }

  /// Whether anything is added to the tile.
  [[nodiscard]] __device__ bool adds() const { return adds_; }

  [[nodiscard]] __device__ int num_ranks() const { return params_.others + 1; }
  /// Whether `rank` is this one, whose part of the tile it has computed itself.
  [[nodiscard]] __device__ bool is_own(int rank) const { return rank == params_.lower; }

  /// What another rank has sent of elements [col, col + 8) of row `row` of the tile.
  [[nodiscard]] __device__ uint4 part(const TileWork& work, int row, int col, int rank) const {
    return load_received(address(work, row, col, rank), work.cols - col);
  }
  /// The same where the tile's parts `are_vectors`.
  [[nodiscard]] __device__ uint4 part_vector(const TileWork& work, int row, int col, int rank) const {
    return __ldcg(reinterpret_cast<const uint4*>(address(work, row, col, rank)));
  }
  /// Whether all 8 elements from every eighth column on are there, and lie as 16 bytes do.
  [[nodiscard]] __device__ bool are_vectors(const TileWork& work) const {
    std::int64_t all =
        work.cols | static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(received()) / 2);
#pragma unroll 1
    for (int s = 0; s < params_.others; ++s) all |= __ldg(offsets_ + s);
    return all % kVectorElements == 0;
  }

  /// 8 elements of the sum, to which the ranks' parts are added in their order.
  class Sum {
   public:
    __device__ Sum() { clear(); }
    __device__ void add(const uint4& part) {
      float operand[kVectorElements];
      Packed{part}.unpack(operand);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) values_[i] += operand[i];
    }
    __device__ uint4 take() {
      const uint4 bits = Packed::pack(values_).bits;
      clear();
      return bits;
    }

   private:
    __device__ void clear() {
#pragma unroll
      for (float& value : values_) value = -0.0F;  // 0 + x would lose the sign of -0
    }
    float values_[kVectorElements];
  };

 private:
  [[nodiscard]] __device__ const std::uint16_t* received() const {
    return static_cast<const std::uint16_t*>(params_.received);
  }
  [[nodiscard]] __device__ const std::uint16_t* address(const TileWork& work, int row, int col,
                                                        int rank) const {
    const int other = rank < params_.lower ? rank : rank - 1;
    return received() + __ldg(offsets_ + other) + static_cast<std::int64_t>(row) * work.cols + col;
  }

  const Params& params_;
  SliceGate<false> gate_;
  int next_;  // position of the tile after this one
  int step_;
  const std::int64_t* offsets_ = nullptr;
  bool adds_ = false;
};

}  // namespace flashoverlap::cuda

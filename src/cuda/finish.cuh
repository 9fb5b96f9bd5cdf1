// The device side of finish gates: what a storing role does before and while it stores each tile.
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
 public:
  using Params = DeviceFinish;
  static constexpr bool kAdds = true;

  __device__ TileSum(const Params& params, int num_positions, int first, int step)
      : params_(params), gate_(params.gates, num_positions, first, step), next_(first), step_(step) {}

  /// Until the next tile of the walk may be stored. By whole warps.
  __device__ void begin_tile() {
    gate_.wait();
    offsets_ = params_.offsets + static_cast<std::int64_t>(next_) * params_.others;
    adds_ = params_.others > 0 && __ldg(offsets_) >= 0;
    next_ += step_;
  }

  /// Whether anything is added to the tile.
  [[nodiscard]] __device__ bool adds() const { return adds_; }

  /// Elements [col, col + 8) of row `row` of the tile, `own` of which this rank has computed.
  [[nodiscard]] __device__ uint4 sum(const TileWork& work, int row, int col, const uint4& own) const {
    const std::int64_t at = static_cast<std::int64_t>(row) * work.cols + col;
    const int cols = work.cols - col;
    float values[kVectorElements] = {};
#pragma unroll 2
    for (int s = 0; s <= params_.others; ++s) {
      const Packed part{s == params_.lower ? own : load_received(received() + offset_of(s) + at, cols)};
      float operand[kVectorElements];
      part.unpack(operand);
      // No 0 + x, which would lose the sign of -0.
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) values[i] = s == 0 ? operand[i] : values[i] + operand[i];
    }
    return Packed::pack(values).bits;
  }

 private:
  using Packed = Vector<std::conditional_t<kIsBf16, __nv_bfloat16, __half>>;

  [[nodiscard]] __device__ const std::uint16_t* received() const {
    return static_cast<const std::uint16_t*>(params_.received);
  }
  [[nodiscard]] __device__ std::int64_t offset_of(int rank) const {
    return __ldg(offsets_ + (rank < params_.lower ? rank : rank - 1));
  }

  const Params& params_;
  SliceGate<false> gate_;
  int next_;  // position of the tile after this one
  int step_;
  const std::int64_t* offsets_ = nullptr;
  bool adds_ = false;
};

}  // namespace flashoverlap::cuda

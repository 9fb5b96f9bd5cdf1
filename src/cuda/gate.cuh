// The device side of gates: what a loading role does before the first load of each tile.
#pragma once

#include "gate.h"
#include "ptx.cuh"
#include "tile_work.h"

namespace flashoverlap::cuda {

/// All operands are there from the start. Compiles to nothing.
struct NoGate {
  struct Params {};
  template <class AnyParams>
  __device__ NoGate(const AnyParams& /*params*/, int /*num_positions*/, int /*first*/, int /*step*/) {}
  __device__ void wait() {}
};

/// The gates of one walk over the schedule: positions first, first + step, … as in ScheduleWalk, each with
/// `per_position` of them one after the other. What the slices' writers released is acquired by the first
/// lane of a warp, and by it for the others. `kByCopyEngine`: the loads that follow are the copy engine's,
/// which sees memory through another proxy.
template <bool kByCopyEngine>
class SliceGate {
 public:
  using Params = DeviceGates;

  __device__ SliceGate(const Params& params, int num_positions, int first, int step)
      : params_(params), num_positions_(num_positions), position_(first), step_(step) {
    fetch();
  }

  /// Until the current gate is open; moves on to the next one. By whole warps.
  __device__ void wait() {
    const std::uint32_t needed = next_;
    if (++part_ == params_.per_position) {
      part_ = 0;
      position_ += step_;
    }
    fetch();
    // Most tiles need no more than the one before them did.
    if (needed <= seen_ || gave_up_) return;
    // One lane: requests of a warp's lanes with system scope are not made one, and 32 of them from every SM
    // slow down the very transfers that are waited for (seen on four H200s: from 300 GB/s to 1.4 GB/s).
    if (threadIdx.x % 32 == 0) poll(needed);
    __syncwarp();  // the other lanes' loads come after what lane 0 has acquired
    seen_ = __shfl_sync(0xffffffffU, seen_, 0);
    gave_up_ = __shfl_sync(0xffffffffU, static_cast<int>(gave_up_), 0) != 0;
    if constexpr (kByCopyEngine) ptx::fence_proxy_async();
  }

 private:
  // Between polls: many warps wait for one address, and the slice's bytes travel through the same memory.
  static constexpr unsigned kPollIntervalNs = 200;
  // The clock and the abort word, which lies across the bus, are looked at every so many polls: about once a
  // millisecond.
  static constexpr unsigned kPollsPerCheck = 1024;

  // Ahead of its use, so that the wait for this entry hides behind the tile before.
  __device__ void fetch() {
    if (position_ < num_positions_ && params_.needed != nullptr)
      next_ = __ldg(params_.needed + position_ * params_.per_position + part_);
  }

  __device__ void poll(std::uint32_t needed) {
    const std::uint64_t begin = ptx::global_timer_ns();
    for (unsigned round = 1;; ++round) {
      seen_ = ptx::ld_acquire_sys(params_.arrivals);
      if (seen_ >= needed) return;
      if (round % kPollsPerCheck == 0) {
        if (params_.abort != nullptr && ptx::ld_acquire_sys(params_.abort) != 0) return give_up(4, needed);
        if (ptx::global_timer_ns() - begin > params_.timeout_ns) return give_up(3, needed);
      }
      __nanosleep(kPollIntervalNs);
    }
  }

  // The tile is computed from what is there: the host learns of it, and throws, before anyone uses the
  // result.
  __device__ void give_up(std::uint32_t code, std::uint32_t needed) {
    gave_up_ = true;
    if (params_.error == nullptr) return;
    params_.error->group = needed - 1;
    params_.error->seen = seen_;
    params_.error->expected = needed;
    ptx::st_release_sys(&params_.error->code, code);
  }

  const Params& params_;
  int num_positions_;
  int position_;
  int step_;
  int part_ = 0;
  std::uint32_t next_ = 0;
  std::uint32_t seen_ = 0;
  bool gave_up_ = false;
};

}  // namespace flashoverlap::cuda

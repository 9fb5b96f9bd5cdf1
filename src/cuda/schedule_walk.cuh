// The walk of one role of one cluster over the schedule.
#pragma once

#include <cstring>

#include "tile_work.h"

namespace flashoverlap::cuda {

// Positions first, first + step, ... The next entry is read while the current tile is worked on.
class ScheduleWalk {
 public:
  __device__ ScheduleWalk(const DeviceTables& tables, int first, int step)
      : tables_(tables), position_(first), step_(step) {
    fetch();
    advance();
  }
  __device__ bool done() const { return done_; }
  __device__ const TileWork& work() const { return work_; }
  // Whether the next tile of this walk counts for the same group.
  __device__ bool group_goes_on() const {
    return position_ < tables_.num_positions && next_.group == work_.group;
  }
  __device__ void advance() {
    work_ = next_;
    done_ = position_ >= tables_.num_positions;
    position_ += step_;
    fetch();
  }

 private:
  __device__ void fetch() {
    if (position_ >= tables_.num_positions) return;
    static_assert(sizeof(TileWork) == 2 * sizeof(int4));
    const auto* entry = reinterpret_cast<const int4*>(tables_.schedule + position_);
    const int4 halves[2] = {__ldg(entry), __ldg(entry + 1)};
    memcpy(&next_, halves, sizeof next_);
  }

  const DeviceTables& tables_;
  int position_;
  int step_;
  bool done_ = false;
  TileWork work_;
  TileWork next_;
};

}  // namespace flashoverlap::cuda

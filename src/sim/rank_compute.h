#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashoverlap/plan.h"
#include "flashoverlap/timeline.h"
#include "sim/compute_model.h"
#include "sim/random.h"

/// The computing side of one simulated rank. It lives in *work time*: time as it passes while nothing slows
/// the units down. The simulation maps work time to real time (WorkClock), so that a slow-down does not touch
/// anything in here.
namespace flashoverlap::sim {

class RankCompute {
 public:
  virtual ~RankCompute() = default;
  /// Work time of the next thing to happen; infinity: nothing, until a slice arrives or for good.
  [[nodiscard]] virtual double next_work_us() const = 0;
  /// Lets it happen, at `now_us` in real time. Returns the groups that it completes.
  virtual std::vector<std::int64_t> step(double now_us) = 0;
  virtual void slice_arrived(std::int64_t slice, double work_us, double now_us) = 0;
  [[nodiscard]] virtual bool done() const = 0;
  /// Sum of the time that units computed, in work time.
  [[nodiscard]] virtual double busy_us() const = 0;
  /// Slice that the tile which completed `group` was last held up by, or -1.
  [[nodiscard]] virtual std::int64_t held_up_by(std::int64_t group) const = 0;
  /// For a rank that is stuck: which tile waits for which slice.
  [[nodiscard]] virtual std::string stuck() const = 0;
};

/// When each group of a plan without gates ends, and how long its units compute: known before the start.
struct GroupEnds {
  std::vector<double> work_us;
  std::vector<std::int64_t> order;  ///< Groups by end.
  double busy_us = 0;
};
GroupEnds group_ends(const OverlapPlan& plan, const ComputeModel& model, double slow_factor, Jitter jitter);

/// A plan without gates.
std::unique_ptr<RankCompute> make_planned_compute(std::shared_ptr<const GroupEnds> ends);

/// Any plan, tile by tile. `timeline`, when not null, gets spans of `rank`. All references must outlive it.
std::unique_ptr<RankCompute> make_tile_compute(const OverlapPlan& plan, const ComputeModel& model,
                                               double slow_factor, Jitter jitter, std::int32_t rank,
                                               Timeline* timeline);

}  // namespace flashoverlap::sim

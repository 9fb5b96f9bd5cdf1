#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/plan.h"

/// How long the tiles of one rank's plan take on a machine, and when they end when nothing holds them up.
namespace flashoverlap::sim {

class ComputeModel {
 public:
  /// Throws Error(kBadArgument) when the machine has no kernel for the plan's type. `plan` must outlive this.
  ComputeModel(const OverlapPlan& plan, const MachineProfile& machine);

  [[nodiscard]] double launch_us() const { return launch_us_; }
  [[nodiscard]] double tile_us(std::int64_t tile) const;
  [[nodiscard]] const GemmKernel& kernel() const { return kernel_; }

  /// When the last tile of each group ends, gates and communication left out: each unit that becomes free
  /// takes the next position of the schedule (ties: the unit with the lower number). An empty group ends with
  /// the one before it.
  [[nodiscard]] std::vector<double> group_ends_us() const;

 private:
  const OverlapPlan& plan_;
  GemmKernel kernel_;
  double launch_us_ = 0;
  double factor_ = 1;  ///< Measured duration of exactly this GEMM over the modelled one.
};

/// The pass that puts the received data of `plan` in order; 0 when there is none.
double restore_us(const OverlapPlan& plan, const MachineProfile& machine);

}  // namespace flashoverlap::sim

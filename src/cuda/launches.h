// Into which launches the GEMM of a plan is cut on a GPU. Knows no CUDA, so that it is tested everywhere.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "arrivals.h"
#include "flashoverlap/plan.h"
#include "plan/row_runs.h"

namespace flashoverlap::cuda {

/// Positions [first, first + count) of the schedule, computed by one launch.
struct LaunchRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::uint32_t arrivals =
      0;                    ///< Slices that must have arrived before it; never fewer than for the one before.
  std::int64_t group = -1;  ///< The group that is complete once it is done, and that a transfer follows.
  bool operator==(const LaunchRange&) const = default;
};

/// Where a schedule is cut.
enum class Cut : std::uint8_t {
  kNowhere,           ///< One launch, whose tiles wait for slices and signal groups themselves.
  kGroups,            ///< Behind each group that a transfer follows; tiles wait and signal all the same.
  kGroupsAndArrivals  ///< Also before each tile that needs more slices than those before it.
};

/// In the order of the schedule, none of them empty. `arrivals` is 0 but with kGroupsAndArrivals. A tile that
/// takes A in blocks counts as needing all of them: it waits inside only where one launch has all tiles.
[[nodiscard]] std::vector<LaunchRange> launch_ranges(const OverlapPlan& plan, const GateTables& tables,
                                                     Cut cut);

/// By launch, the rows of A that its tiles read and those of no launch before it: runs in the order of rows,
/// as long as can be. Throws as RowRuns.
[[nodiscard]] std::vector<std::vector<plan::RowRun>> rows_of_launches(const OverlapPlan& plan,
                                                                      std::span<const LaunchRange> launches);

}  // namespace flashoverlap::cuda

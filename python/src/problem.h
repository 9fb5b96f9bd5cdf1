#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/slice_choice.h"
#include "flashoverlap/tuner.h"
#include "plan/sliced_call.h"

namespace flashoverlap::python {

/// A call on paper: nothing of it is run.
struct Problem {
  std::string operation;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t world_size = 2;
  std::string dtype = "f32";
  std::string rows = "contiguous";
  std::string method = "auto";  ///< Plans: also "serial" and "sliced". Reduce-scatter: "signal", "tail-free".
  std::vector<std::int64_t> tile;                       ///< tile_m, tile_n, swizzle; fewer or 0: chosen.
  std::vector<std::int64_t> partition;                  ///< Empty: chosen.
  std::vector<std::vector<std::int32_t>> destinations;  ///< All-to-all: of each rank.
  HeadSlices slices;                                    ///< `columns` along heads only.
  std::int64_t num_slices = 0;                          ///< Of the slicing baseline; 0: none.
  std::int64_t units = 0;                               ///< Of one rank; 0: chosen.
};

/// `list[index]`, or 0.
[[nodiscard]] std::int64_t item_or_zero(const std::vector<std::int64_t>& list, std::size_t index);

/// The operator with slices that a problem is about; nothing for one with wave groups.
[[nodiscard]] std::optional<plan::SlicedOp> sliced_op(const Problem& problem);

// All below throw Error(kBadArgument) for what does not hold.

void check_world_size(const Problem& problem, std::int64_t most);

/// Wave groups: the tuner's best, with the partition that was asked for in place of its own.
[[nodiscard]] TuneRequest tune_request(const Problem& problem, const MachineProfile& machine);
[[nodiscard]] TuneResult tuned(const Problem& problem, const TuneRequest& request,
                               const MachineProfile& machine);

/// Slices: the plans of all ranks. Tile and units are the machine's where they are open.
[[nodiscard]] std::vector<OverlapPlan> sliced_plans(const Problem& problem, const MachineProfile& machine,
                                                    plan::SlicedPlan which);
[[nodiscard]] PartsChoice choose_parts(const Problem& problem, const MachineProfile& machine);

}  // namespace flashoverlap::python

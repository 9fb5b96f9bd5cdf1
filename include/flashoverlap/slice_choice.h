#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/plan.h"
#include "flashoverlap/simulator.h"

/// How slices should travel on a machine, how finely (`SliceOptions::parts`) and how many at a time
/// (`send_channels`): found by simulating the plans of all ranks.
namespace flashoverlap {

/// How slices travel: fields of SliceOptions.
struct SliceCut {
  std::int64_t parts = 0;
  std::int64_t send_channels = 0;
  bool operator==(const SliceCut&) const = default;
};

/// A call whose slices can be cut.
struct PartsRequest {
  std::string operation;  ///< For messages.
  std::int32_t world_size = 1;
  /// The plan of one rank with so many parts and send channels; 0 is the builder's own choice.
  std::function<OverlapPlan(std::int32_t rank, const SliceCut& cut)> plan;
  /// What the caller has chosen; what is 0 there is open. Parts 0, 1, 2, 4, 8, 16, 32 are tried, as far as
  /// there is more to cut and the plans do not get too long to simulate; then, where communication shows, 1,
  /// 2 and 4 channels, and with those that gain, finer parts again.
  SliceCut given = {};
  SimulationOptions simulation = {};
};

struct PartsCandidate {
  SliceCut cut;
  double total_us = 0;  ///< Simulated, the slowest rank.
};

struct PartsChoice {
  SliceCut cut;
  double total_us = 0;                     ///< Simulated; 0 where nothing had to be.
  std::vector<PartsCandidate> candidates;  ///< Those that were simulated, in the order of trial.
  std::string reason;                      ///< One line: which is chosen, and why.
};

/// The first candidate that is within half a percent of the quickest, since no profile is better than that.
/// Candidates whose messages alone, one channel's after the other, take as long as the quickest before are
/// not simulated. Deterministic. Throws what request.plan throws, and Error(kBadArgument) for a world size
/// below 1, and a machine that lacks the type or the transfers.
[[nodiscard]] PartsChoice choose_parts(const PartsRequest& request, const MachineProfile& machine);

}  // namespace flashoverlap

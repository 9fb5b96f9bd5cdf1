#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/plan.h"
#include "flashoverlap/simulator.h"

/// How finely slices should travel (`SliceOptions::parts`) on a machine: found by simulating the plans of all
/// ranks.
namespace flashoverlap {

/// A call whose slices can be cut.
struct PartsRequest {
  std::string operation;  ///< For messages.
  std::int32_t world_size = 1;
  /// The plan of one rank with so many parts; 0 is the builder's own choice.
  std::function<OverlapPlan(std::int32_t rank, std::int64_t parts)> plan;
  /// Tried in this order, ascending; empty: 0, 1, 2, 4, 8, 16, 32, as far as there is more to cut and the
  /// plans do not get too long to simulate.
  std::vector<std::int64_t> candidates = {};
  SimulationOptions simulation = {};
};

struct PartsCandidate {
  std::int64_t parts = 0;
  double total_us = 0;  ///< Simulated, the slowest rank.
};

struct PartsChoice {
  std::int64_t parts = 0;
  std::vector<PartsCandidate> candidates;  ///< Those that were simulated, in the order of trial.
  std::string reason;                      ///< One line: which is chosen, and why.
};

/// The first candidate that is within half a percent of the quickest, since no profile is better than that.
/// Deterministic. Throws what request.plan throws, and Error(kBadArgument) for a world size below 1,
/// candidates below 0, and a machine that lacks the type or the transfers.
[[nodiscard]] PartsChoice choose_parts(const PartsRequest& request, const MachineProfile& machine);

}  // namespace flashoverlap

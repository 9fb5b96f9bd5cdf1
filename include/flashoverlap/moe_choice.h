#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/moe_plan.h"
#include "flashoverlap/simulator.h"

/// Whether a MoE layer gains by overlap on a machine, and with how many consumers and how large segments:
/// found by simulating the plans of all ranks.
namespace flashoverlap {

struct MoeChoiceRequest {
  /// The layer as it would be overlapped. `rank` is not looked at; resources.communication_units are the
  /// consumers, resources.compute_units the units of one rank that compute when nothing is overlapped.
  MoePlanOptions options;
  MoeCounts counts;
  std::int64_t hidden = 0;
  std::int64_t hidden_cols = 0;  ///< Of the first GEMM's output: 2 * intermediate with gate.
  std::int64_t intermediate = 0;
  /// Consumers take units from computing: SMs do, copy engines and CPU threads that mostly wait do not.
  bool consumers_take_units = true;
  /// Candidates; empty: what `options` says. Those that leave no unit to compute are passed over.
  std::vector<std::int64_t> consumers;
  std::vector<std::int64_t> segment_bands;
  SimulationOptions simulation;
};

/// One way to carry the layer out, and what its two phases take, in microseconds.
struct MoeCandidate {
  MoePlanOptions options;
  double dispatch_us = 0;  ///< Dispatch and first GEMM, the slowest rank.
  double combine_us = 0;   ///< Second GEMM and return.
  [[nodiscard]] double total_us() const { return dispatch_us + combine_us; }
};

struct MoeChoice {
  /// The same tiles on all units, one all-to-all before and one after.
  MoeCandidate serial;
  double dispatch_gemm_us = 0;  ///< The GEMMs of `serial` alone.
  double combine_gemm_us = 0;
  std::vector<MoeCandidate> candidates;  ///< Overlapped ones, best first; of equal ones the first asked for.
  std::string reason;                    ///< One line: which is chosen, and why.
  [[nodiscard]] const MoeCandidate& best_overlap() const { return candidates.front(); }
  /// Ties go to no overlap.
  [[nodiscard]] bool overlaps() const { return best_overlap().total_us() < serial.total_us(); }
};

/// Deterministic. Throws Error(kBadArgument) for options and counts that do not hold, candidates below 1, a
/// machine that lacks the type or the transfers, and when no candidate leaves a unit to compute.
[[nodiscard]] MoeChoice choose_moe(const MoeChoiceRequest& request, const MachineProfile& machine);

}  // namespace flashoverlap

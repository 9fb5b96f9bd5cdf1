#include "flashoverlap/moe_choice.h"

#include <fmt/core.h>

#include <algorithm>

#include "core/fail.h"

namespace flashoverlap {
namespace {

struct Phase {
  double total_us = 0;
  double gemm_us = 0;  ///< Of the slowest rank, alone.
};

/// `asked` has the machine's units, plans those that compute a tile each.
Phase phase_of(const MoeChoiceRequest& request, const MoePlanOptions& asked, const MachineProfile& machine,
               bool second) {
  MoePlanOptions options = asked;
  options.resources.compute_units =
      machine.gemm.compute_units(asked.dtype, asked.tile_m, asked.tile_n, asked.resources.compute_units);
  const std::vector<OverlapPlan> plans =
      second ? plan_moe_combine_all(options, request.counts, request.hidden, request.intermediate)
             : plan_moe_dispatch_all(options, request.counts, request.hidden_cols, request.hidden);
  const SimulationResult result = simulate(std::span<const OverlapPlan>(plans), machine, request.simulation);
  Phase phase{.total_us = result.total_us};
  for (const RankSimulation& rank : result.ranks) phase.gemm_us = std::max(phase.gemm_us, rank.alone_us);
  return phase;
}

MoePlanOptions serial_options(const MoeChoiceRequest& request) {
  MoePlanOptions options = serial_moe_options(request.options);
  options.resources.communication_units = 0;
  return options;
}

std::vector<MoePlanOptions> candidates_of(const MoeChoiceRequest& request) {
  const auto or_asked = [](const std::vector<std::int64_t>& list, std::int64_t asked) {
    return list.empty() ? std::vector{asked} : list;
  };
  const std::int64_t units = request.options.resources.compute_units;
  const bool puts = request.options.transport == MoeTransport::kPut;
  std::vector<MoePlanOptions> candidates;
  for (const std::int64_t consumers :
       or_asked(request.consumers, request.options.resources.communication_units)) {
    for (const std::int64_t bands : or_asked(request.segment_bands, request.options.segment_bands)) {
      MoePlanOptions options = request.options;
      options.segment_bands = bands;
      const std::int64_t taken = request.consumers_take_units && puts ? consumers : 0;
      if (units - taken < 1) continue;
      options.resources = {.compute_units = units - taken, .communication_units = puts ? consumers : 0};
      candidates.push_back(options);
      if (!puts) return candidates;  // neither matters to all-to-alls
    }
  }
  if (candidates.empty()) {
    core::fail(ErrorKind::kBadArgument, "no number of consumers leaves one of {} units to compute", units);
  }
  return candidates;
}

std::string reason_of(const MoeChoice& choice) {
  const MoeCandidate& best = choice.best_overlap();
  const double gemm = choice.dispatch_gemm_us + choice.combine_gemm_us;
  const double transfers = choice.serial.total_us() - gemm;
  if (choice.overlaps()) {
    return fmt::format("overlapped: {:.1f} us instead of {:.1f} us, of {:.1f} us that are not GEMM",
                       best.total_us(), choice.serial.total_us(), transfers);
  }
  return fmt::format(
      "serial: {:.1f} us, overlapped {:.1f} us; GEMMs of {:.1f} us have too little to hide {:.1f} us behind",
      choice.serial.total_us(), best.total_us(), gemm, transfers);
}

}  // namespace

MoeChoice choose_moe(const MoeChoiceRequest& request, const MachineProfile& machine) {
  const auto price = [&](const MoePlanOptions& options, double* dispatch_gemm_us, double* combine_gemm_us) {
    const Phase dispatch = phase_of(request, options, machine, false);
    const Phase combine = phase_of(request, options, machine, true);
    if (dispatch_gemm_us != nullptr) *dispatch_gemm_us = dispatch.gemm_us;
    if (combine_gemm_us != nullptr) *combine_gemm_us = combine.gemm_us;
    return MoeCandidate{.options = options, .dispatch_us = dispatch.total_us, .combine_us = combine.total_us};
  };
  MoeChoice choice;
  choice.serial = price(serial_options(request), &choice.dispatch_gemm_us, &choice.combine_gemm_us);
  for (const MoePlanOptions& options : candidates_of(request)) {
    choice.candidates.push_back(price(options, nullptr, nullptr));
  }
  std::ranges::stable_sort(choice.candidates, {}, &MoeCandidate::total_us);
  choice.reason = reason_of(choice);
  return choice;
}

}  // namespace flashoverlap

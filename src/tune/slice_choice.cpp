#include "flashoverlap/slice_choice.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>

#include "core/fail.h"

namespace flashoverlap {
namespace {

constexpr std::int64_t kTried[] = {0, 1, 2, 4, 8, 16, 32};
// Of all ranks together; more take seconds to simulate.
constexpr std::int64_t kMostTransfers = 1 << 16;
constexpr double kAlike = 1.005;

std::vector<OverlapPlan> plans_with(const PartsRequest& request, std::int64_t parts) {
  if (parts < 0) {
    core::fail(ErrorKind::kBadArgument, "candidate for the parts of a slice is {}; it must be at least 0",
               parts);
  }
  std::vector<OverlapPlan> plans;
  for (std::int32_t rank = 0; rank < request.world_size; ++rank) plans.push_back(request.plan(rank, parts));
  return plans;
}

std::int64_t num_transfers(const std::vector<OverlapPlan>& plans) {
  std::int64_t count = 0;
  for (const OverlapPlan& plan : plans) count += std::ssize(plan.transfers);
  return count;
}

std::string text_of(std::int64_t parts) {
  if (parts == 0) return "as few parts as leave no tail";
  return parts == 1 ? "1 part" : fmt::format("{} parts", parts);
}

std::string reason_of(const PartsChoice& choice) {
  std::vector<std::string> others;
  double chosen_us = 0;
  for (const PartsCandidate& candidate : choice.candidates) {
    if (candidate.parts == choice.parts) {
      chosen_us = candidate.total_us;
    } else {
      others.push_back(fmt::format("{}: {:.1f} us", text_of(candidate.parts), candidate.total_us));
    }
  }
  const std::string text = fmt::format("{}: {:.1f} us simulated", text_of(choice.parts), chosen_us);
  return others.empty() ? text : fmt::format("{}; {}", text, fmt::join(others, ", "));
}

}  // namespace

PartsChoice choose_parts(const PartsRequest& request, const MachineProfile& machine) {
  if (request.world_size < 1) {
    core::fail(ErrorKind::kBadArgument, "world size is {}; it must be at least 1", request.world_size);
  }
  const bool open = request.candidates.empty();
  const std::span<const std::int64_t> tried =
      open ? std::span<const std::int64_t>(kTried) : std::span<const std::int64_t>(request.candidates);
  PartsChoice choice;
  std::int64_t transfers_before = -1;
  for (const std::int64_t parts : tried) {
    const std::vector<OverlapPlan> plans = plans_with(request, parts);
    const std::int64_t transfers = num_transfers(plans);
    if (open && parts > 1 && (transfers == transfers_before || transfers > kMostTransfers)) break;
    if (parts > 0) transfers_before = transfers;
    const SimulationResult result =
        simulate(std::span<const OverlapPlan>(plans), machine, request.simulation);
    choice.candidates.push_back({parts, result.total_us});
  }
  const double best_us = std::ranges::min(choice.candidates, {}, &PartsCandidate::total_us).total_us;
  choice.parts = std::ranges::find_if(choice.candidates, [&](const PartsCandidate& candidate) {
                   return candidate.total_us <= kAlike * best_us;
                 })->parts;
  choice.reason = reason_of(choice);
  return choice;
}

}  // namespace flashoverlap

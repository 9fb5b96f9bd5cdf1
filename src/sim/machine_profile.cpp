#include "flashoverlap/machine_profile.h"

#include <algorithm>

#include "core/fail.h"
#include "sim/topology.h"

namespace flashoverlap {
namespace {

std::string list_curves(const MachineProfile& profile) {
  std::string list;
  for (const CommunicationCurve& curve : profile.curves) {
    list += fmt::format("{}{} of {} ranks on {} units", list.empty() ? "" : ", ", name_of(curve.collective),
                        curve.world_size, curve.units);
  }
  return list.empty() ? "none" : list;
}

}  // namespace

const CommunicationCurve* MachineProfile::measured_curve(TransferKind collective, std::int64_t world_size,
                                                         std::int64_t communication_units,
                                                         DType dtype) const {
  const CommunicationCurve* found = nullptr;
  for (const CommunicationCurve& candidate : curves) {
    if (candidate.collective != collective || candidate.world_size != world_size ||
        candidate.units != communication_units) {
      continue;
    }
    if (candidate.dtype == dtype) return &candidate;
    if (!candidate.dtype) found = &candidate;
  }
  return found;
}

BandwidthCurve MachineProfile::curve(TransferKind collective, std::int64_t world_size,
                                     std::int64_t communication_units, DType dtype) const {
  if (world_size < 2) {
    core::fail(ErrorKind::kBadArgument,
               "machine '{}': {} ranks have nothing to communicate, at least 2 are needed", name, world_size);
  }
  if (const CommunicationCurve* measured =
          measured_curve(collective, world_size, communication_units, dtype)) {
    return measured->curve;
  }
  if (levels.empty()) {
    core::fail(
        ErrorKind::kBadArgument,
        "machine '{}' has neither a topology nor a curve for {} of {} ranks on {} units; its curves: {}",
        name, name_of(collective), world_size, communication_units, list_curves(*this));
  }
  const std::vector<sim::LevelUse> uses = sim::level_uses(levels, world_size, name);
  const sim::CollectiveCost cost = sim::collective_cost(collective, uses, world_size);
  return BandwidthCurve::from_link(
      cost.latency_us, 1e-3 / cost.us_per_byte,
      fmt::format("{} of {} ranks on the topology of {}", name_of(collective), world_size, name));
}

std::vector<std::int64_t> MachineProfile::communication_unit_choices(TransferKind collective,
                                                                     std::int64_t world_size) const {
  std::vector<std::int64_t> choices;
  for (const CommunicationCurve& candidate : curves) {
    if (candidate.collective == collective && candidate.world_size == world_size)
      choices.push_back(candidate.units);
  }
  if (choices.empty()) return {0};
  std::sort(choices.begin(), choices.end());
  choices.erase(std::unique(choices.begin(), choices.end()), choices.end());
  return choices;
}

}  // namespace flashoverlap

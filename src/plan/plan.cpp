#include "flashoverlap/plan.h"

#include <algorithm>

#include "plan/arithmetic.h"

namespace flashoverlap {

std::int64_t OverlapPlan::num_waves() const {
  return plan::ceil_div(static_cast<std::int64_t>(schedule.size()), resources.compute_units);
}

std::int64_t OverlapPlan::group_of(std::int64_t position) const {
  // Of several groups that begin here all but the last are empty.
  const auto after =
      std::upper_bound(groups.begin(), groups.end(), position,
                       [](std::int64_t p, const WaveGroup& g) { return p < g.first_position; });
  return static_cast<std::int64_t>(after - groups.begin()) - 1;
}

std::vector<std::int64_t> OverlapPlan::passes() const {
  std::vector<std::int64_t> begins{0};
  for (const Gate& gate : gates) {
    const bool inside = gate.point == GatePoint::kStart && gate.k_begin > 0 && gate.k_begin < grid.k();
    if (inside && gate.k_begin != begins.back()) begins.push_back(gate.k_begin);
  }
  std::ranges::sort(begins);
  begins.erase(std::unique(begins.begin(), begins.end()), begins.end());
  return begins;
}

std::vector<std::int64_t> OverlapPlan::partition() const {
  // A wave that two groups share counts for the earlier one, so that the sum is the number of waves.
  std::vector<std::int64_t> waves;
  for (const WaveGroup& group : groups) {
    waves.push_back(plan::ceil_div(group.first_position + group.num_tiles, resources.compute_units) -
                    plan::ceil_div(group.first_position, resources.compute_units));
  }
  return waves;
}

std::string_view name_of(TransferKind kind) {
  switch (kind) {
    case TransferKind::kAllReduce:
      return "all-reduce";
    case TransferKind::kReduceScatter:
      return "reduce-scatter";
    case TransferKind::kAllGather:
      return "all-gather";
    case TransferKind::kAllToAll:
      return "all-to-all";
    case TransferKind::kSend:
      return "send";
    case TransferKind::kReceive:
      return "receive";
    case TransferKind::kPut:
      return "put";
  }
  return "?";
}

std::string_view name_of(BufferKind kind) {
  switch (kind) {
    case BufferKind::kInput:
      return "input";
    case BufferKind::kWeight:
      return "weight";
    case BufferKind::kPacked:
      return "packed";
    case BufferKind::kReceived:
      return "received";
    case BufferKind::kOutput:
      return "output";
  }
  return "?";
}

}  // namespace flashoverlap

#include <algorithm>
#include <numeric>
#include <optional>

#include "core/fail.h"
#include "flashoverlap/predictor.h"
#include "sim/compute_model.h"
#include "sim/transfer_bytes.h"

namespace flashoverlap {
namespace {

/// A machine on which nothing is sent still needs a curve; no byte is ever looked up in it.
BandwidthCurve unused_curve() {
  return BandwidthCurve::from_link(0, 1, "nothing is sent");
}

/// The collective that each group sets off; nullopt when nothing is sent at all (one rank).
std::optional<TransferKind> collective_of(const OverlapPlan& plan) {
  std::optional<TransferKind> kind;
  for (const Transfer& transfer : plan.transfers) {
    if (transfer.trigger.kind != TriggerKind::kGroup || transfer.peer >= 0 ||
        (kind && *kind != transfer.kind)) {
      core::fail(ErrorKind::kBadArgument,
                 "the predictor prices plans with one kind of collective per wave group; plan '{}' has "
                 "another {}: use the "
                 "simulator",
                 plan.operation, name_of(transfer.kind));
    }
    kind = transfer.kind;
  }
  return kind;
}

void add_plan(const OverlapPlan& plan, const MachineProfile& machine, OverlapCost& cost) {
  const std::vector<double> ends = sim::ComputeModel(plan, machine).group_ends_us();
  if (ends.size() != cost.finish_us.size()) {
    core::fail(ErrorKind::kBadArgument, "rank {}'s plan has {} groups and another one {}: all must be equal",
               plan.rank, ends.size(), cost.finish_us.size());
  }
  for (std::size_t i = 0; i < ends.size(); ++i) cost.finish_us[i] = std::max(cost.finish_us[i], ends[i]);
  std::vector<std::int64_t> bytes(ends.size(), 0);
  for (const Transfer& transfer : plan.transfers) {
    bytes[static_cast<std::size_t>(transfer.trigger.index)] += sim::curve_bytes(plan, transfer);
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) cost.bytes[i] = std::max(cost.bytes[i], bytes[i]);
  const double restore = sim::restore_us(plan, machine);
  cost.restore_us = std::max(cost.restore_us, restore);
  // One group of an all-reduce is reduced in the output itself.
  if (!plan.transfers.empty() && plan.transfers.front().kind != TransferKind::kAllReduce) {
    cost.single_group_restore_us = std::max(cost.single_group_restore_us, restore);
  }
}

}  // namespace

OverlapCost overlap_cost(std::span<const OverlapPlan> plans, const MachineProfile& machine) {
  if (plans.empty()) core::fail(ErrorKind::kBadArgument, "no plan to price, at least one is needed");
  std::optional<TransferKind> kind;
  for (const OverlapPlan& plan : plans) {
    if (const auto own = collective_of(plan)) kind = own;
  }
  const OverlapPlan& first = plans.front();
  OverlapCost cost{
      .finish_us = std::vector<double>(first.groups.size(), 0),
      .bytes = std::vector<std::int64_t>(first.groups.size(), 0),
      .curve = kind ? machine.curve(*kind, first.world_size, first.resources.communication_units, first.dtype)
                    : unused_curve(),
      .signal_us = kind ? machine.signal_us : 0,
      .slowdown = kind ? machine.slowdown : 1,
      .steal_us_per_mib = kind ? machine.steal_us_per_mib : 0};
  for (const OverlapPlan& plan : plans) add_plan(plan, machine, cost);
  return cost;
}

}  // namespace flashoverlap

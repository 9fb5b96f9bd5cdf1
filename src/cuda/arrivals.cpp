#include "arrivals.h"

#include <algorithm>

#include "core/fail.h"

namespace flashoverlap::cuda {
namespace {

std::size_t as_index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

bool is_pairwise(const Transfer& transfer) {
  return transfer.kind == TransferKind::kSend || transfer.kind == TransferKind::kReceive;
}

void check_transfer(const OverlapPlan& plan, std::size_t index) {
  const Transfer& transfer = plan.transfers[index];
  const bool is_put = transfer.kind == TransferKind::kPut;
  if (!is_put && transfer.trigger.kind != TriggerKind::kSlice) return;
  core::fail(ErrorKind::kUnsupported, "the GPU executor has no {} yet; transfer {} of the plan of {} is one",
             is_put ? "put" : "transfer set off by a slice", index, plan.operation);
}

/// Sends and receives by distance: sends[d] go to the rank d after this one, receives[d] come from the rank d
/// before it.
struct Pairs {
  std::vector<std::vector<std::int64_t>> sends, receives;

  explicit Pairs(const OverlapPlan& plan)
      : sends(as_index(plan.world_size)), receives(as_index(plan.world_size)) {
    for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
      const Transfer& transfer = plan.transfers[i];
      if (!is_pairwise(transfer)) continue;
      const bool is_send = transfer.kind == TransferKind::kSend;
      const std::int32_t steps = is_send ? transfer.peer - plan.rank : plan.rank - transfer.peer;
      const std::size_t distance = as_index((steps + plan.world_size) % plan.world_size);
      (is_send ? sends : receives)[distance].push_back(static_cast<std::int64_t>(i));
    }
  }

  /// The most messages between any two ranks that this rank knows of. All ranks come to the same number where
  /// each rank sends every other one as many.
  [[nodiscard]] std::size_t most() const {
    std::size_t count = 0;
    for (const auto* lists : {&sends, &receives}) {
      for (const auto& list : *lists) count = std::max(count, list.size());
    }
    return count;
  }
};

void add_pairs(const OverlapPlan& plan, std::vector<TransferStep>& steps) {
  const Pairs pairs(plan);
  const std::size_t most = pairs.most();
  for (std::size_t distance = 1; distance < pairs.sends.size(); ++distance) {
    const auto& sends = pairs.sends[distance];
    const auto& receives = pairs.receives[distance];
    for (std::size_t i = 0; i < most; ++i) {
      TransferStep step;
      if (i < sends.size()) step.send = sends[i];
      if (i < receives.size()) step.receive = receives[i];
      steps.push_back(step);
    }
  }
}

void count_arrivals(const OverlapPlan& plan, std::vector<TransferStep>& steps) {
  std::uint32_t arrivals = 0;
  std::int32_t channel = -1;
  for (TransferStep& step : steps) {
    const std::int64_t brings = step.collective >= 0 ? step.collective : step.receive;
    step.brings_slice = brings >= 0 && plan.transfers[as_index(brings)].slice >= 0;
    if (step.brings_slice) {
      if (channel >= 0 && channel != step.channel) {
        core::fail(
            ErrorKind::kUnsupported,
            "the GPU executor takes slices from one channel; in the plan of {} they arrive on channels "
            "{} and {}",
            plan.operation, channel, step.channel);
      }
      channel = step.channel;
      ++arrivals;
    }
    step.arrivals = arrivals;
  }
}

}  // namespace

std::vector<TransferStep> transfer_steps(const OverlapPlan& plan) {
  std::vector<TransferStep> steps;
  for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
    check_transfer(plan, i);
    if (is_pairwise(plan.transfers[i])) continue;
    steps.push_back({.channel = plan.transfers[i].channel, .collective = static_cast<std::int64_t>(i)});
  }
  add_pairs(plan, steps);
  count_arrivals(plan, steps);
  return steps;
}

std::vector<std::uint32_t> needed_arrivals(const OverlapPlan& plan, const std::vector<TransferStep>& steps) {
  if (plan.gates.empty()) return {};
  for (const TransferStep& step : steps) {
    if (step.send < 0 || plan.transfers[as_index(step.send)].trigger.kind == TriggerKind::kStart) continue;
    core::fail(ErrorKind::kUnsupported,
               "the plan of {} has gates, and transfer {} follows a group: in one call with what others send "
               "here, it could wait for a tile that waits for it",
               plan.operation, step.send);
  }
  std::vector<std::uint32_t> arrival_of(plan.slices.size(), 0);
  for (const TransferStep& step : steps) {
    if (!step.brings_slice) continue;
    const std::int64_t brings = step.collective >= 0 ? step.collective : step.receive;
    arrival_of[as_index(plan.transfers[as_index(brings)].slice)] = step.arrivals;
  }
  std::vector<std::uint32_t> of_tile(as_index(plan.grid.num_tiles()), 0);
  for (const Gate& gate : plan.gates) {
    if (gate.point != GatePoint::kStart || gate.k_begin != 0) {
      core::fail(
          ErrorKind::kUnsupported,
          "the GPU executor holds tiles at their start only; tile {} of the plan of {} waits for slice "
          "{} {}",
          gate.tile, plan.operation, gate.slice,
          gate.point == GatePoint::kFinish ? std::string("at its end")
                                           : fmt::format("from column {} on", gate.k_begin));
    }
    const std::uint32_t arrival = arrival_of[as_index(gate.slice)];
    if (arrival == 0) {
      core::fail(ErrorKind::kUnsupported, "no receive and no collective of the plan of {} brings slice {}",
                 plan.operation, gate.slice);
    }
    std::uint32_t& needed = of_tile[as_index(gate.tile)];
    needed = std::max(needed, arrival);
  }
  std::vector<std::uint32_t> needed;
  needed.reserve(plan.schedule.size());
  for (const std::int64_t tile : plan.schedule) needed.push_back(of_tile[as_index(tile)]);
  return needed;
}

}  // namespace flashoverlap::cuda

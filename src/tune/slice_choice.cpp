#include "flashoverlap/slice_choice.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "core/fail.h"
#include "sim/network.h"
#include "sim/transfer_bytes.h"
#include "tune/alike.h"

namespace flashoverlap {
namespace {

using tune::kAlike;

constexpr std::int64_t kTriedParts[] = {0, 1, 2, 4, 8, 16, 32};
constexpr std::int64_t kTriedChannels[] = {1, 2, 4};
// Of all ranks together; more take seconds to simulate.
constexpr std::int64_t kMostTransfers = 1 << 16;

std::int64_t num_transfers(const std::vector<OverlapPlan>& plans) {
  std::int64_t count = 0;
  for (const OverlapPlan& plan : plans) count += std::ssize(plan.transfers);
  return count;
}

std::int64_t num_send_channels(const OverlapPlan& plan) {
  std::set<std::int32_t> channels;
  for (const Transfer& transfer : plan.transfers) {
    if (transfer.kind == TransferKind::kSend) channels.insert(transfer.channel);
  }
  return std::ssize(channels);
}

/// What the plans take at least: a channel's messages come one after the other.
double messages_alone_us(const std::vector<OverlapPlan>& plans, const MachineProfile& machine) {
  sim::Network network(machine, std::ssize(plans));
  double most_us = 0;
  for (std::int64_t rank = 0; rank < std::ssize(plans); ++rank) {
    const OverlapPlan& plan = plans[static_cast<std::size_t>(rank)];
    std::map<std::int32_t, double> by_channel;
    for (const Transfer& transfer : plan.transfers) {
      if (transfer.kind != TransferKind::kSend) continue;
      double& channel_us = by_channel[transfer.channel];
      channel_us += network.message_us(transfer.kind, sim::curve_bytes(plan, transfer), rank, transfer.peer,
                                       plan.resources.communication_units, plan.dtype);
      most_us = std::max(most_us, channel_us);
    }
  }
  return most_us;
}

std::string text_of(const SliceCut& cut) {
  std::string text = cut.parts == 0   ? "as few parts as leave no tail"
                     : cut.parts == 1 ? "1 part"
                                      : fmt::format("{} parts", cut.parts);
  if (cut.send_channels > 0) text += fmt::format(", {} at a time", cut.send_channels);
  return text;
}

std::string reason_of(const PartsChoice& choice) {
  std::vector<std::string> others;
  for (const PartsCandidate& candidate : choice.candidates) {
    if (candidate.cut == choice.cut) continue;
    others.push_back(fmt::format("{}: {:.1f} us", text_of(candidate.cut), candidate.total_us));
  }
  const std::string text = fmt::format("{}: {:.1f} us simulated", text_of(choice.cut), choice.total_us);
  return others.empty() ? text : fmt::format("{}; {}", text, fmt::join(others, ", "));
}

class CutSearch {
 public:
  CutSearch(const PartsRequest& request, const MachineProfile& machine)
      : request_(request), machine_(machine) {}

  PartsChoice find() {
    const SliceCut given = request_.given;
    try_parts(given.send_channels);
    if (given.send_channels == 0 && exposed_us_ > (kAlike - 1) * best_us_) {
      const std::int64_t parts = chosen().cut.parts;
      for (const std::int64_t channels : kTriedChannels) try_cut({parts, channels});
      if (chosen().cut.send_channels > 0) try_parts(chosen().cut.send_channels);
    }
    choice_.cut = chosen().cut;
    choice_.total_us = chosen().total_us;
    choice_.reason = reason_of(choice_);
    return std::move(choice_);
  }

 private:
  /// The first that is as good as the best.
  [[nodiscard]] const PartsCandidate& chosen() const {
    return *std::ranges::find_if(choice_.candidates, [&](const PartsCandidate& candidate) {
      return candidate.total_us <= kAlike * best_us_;
    });
  }

  void try_parts(std::int64_t channels) {
    if (request_.given.parts != 0) {
      try_cut({request_.given.parts, channels});
      return;
    }
    std::int64_t transfers_before = -1;
    for (const std::int64_t parts : kTriedParts) {
      const std::int64_t transfers = try_cut({parts, channels});
      if (parts > 1 && (transfers == transfers_before || transfers > kMostTransfers)) break;
      if (parts > 0) transfers_before = transfers;
    }
  }

  /// Simulates a cut unless it is known already, or known to be no better. Returns the number of transfers of
  /// its plans.
  std::int64_t try_cut(const SliceCut& cut) {
    std::vector<OverlapPlan> plans;
    for (std::int32_t rank = 0; rank < request_.world_size; ++rank) plans.push_back(request_.plan(rank, cut));
    const std::int64_t transfers = num_transfers(plans);
    const bool first = choice_.candidates.empty();
    const bool is_known = !tried_.insert({transfers, num_send_channels(plans.front())}).second;
    if (!first && (is_known || transfers > kMostTransfers)) return transfers;
    if (!first && request_.simulation.jitter == 0 && messages_alone_us(plans, machine_) >= best_us_) {
      return transfers;
    }
    const SimulationResult result =
        simulate(std::span<const OverlapPlan>(plans), machine_, request_.simulation);
    choice_.candidates.push_back({cut, result.total_us});
    if (!first && result.total_us >= best_us_) return transfers;
    best_us_ = result.total_us;
    exposed_us_ = 0;
    for (const RankSimulation& rank : result.ranks)
      exposed_us_ = std::max(exposed_us_, rank.exposed_communication_us);
    return transfers;
  }

  const PartsRequest& request_;
  const MachineProfile& machine_;
  PartsChoice choice_;
  std::set<std::pair<std::int64_t, std::int64_t>> tried_;  // transfers, channels
  double best_us_ = 0;
  double exposed_us_ = 0;  // of the best
};

}  // namespace

PartsChoice choose_parts(const PartsRequest& request, const MachineProfile& machine) {
  if (request.world_size < 1) {
    core::fail(ErrorKind::kBadArgument, "world size is {}; it must be at least 1", request.world_size);
  }
  return CutSearch(request, machine).find();
}

}  // namespace flashoverlap

#include "sim/simulation.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/fail.h"
#include "sim/transfer_bytes.h"

namespace flashoverlap::sim {
namespace {

constexpr double kMib = 1024.0 * 1024.0;
constexpr double kSlowestRate = 0.05;  // communication never stops the computation altogether

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

double slow_factor(const SimulationOptions& options, std::int64_t rank) {
  double factor = 1;
  for (const auto& [slow_rank, slow] : options.slow_ranks) {
    if (slow_rank == rank) factor = slow;
  }
  return factor;
}

bool is_message(TransferKind kind) {
  return kind == TransferKind::kSend || kind == TransferKind::kReceive || kind == TransferKind::kPut;
}

}  // namespace

std::string describe(const OverlapPlan& plan, std::int64_t transfer) {
  const Transfer& t = plan.transfers[at(transfer)];
  std::string text(name_of(t.kind));
  if (t.kind == TransferKind::kReceive) {
    text += fmt::format(" from rank {}", t.peer);
  } else if (t.peer >= 0) {
    text += fmt::format(" to rank {}", t.peer);
  }
  if (t.trigger.kind == TriggerKind::kGroup) text += fmt::format(" of group {}", t.trigger.index);
  if (t.trigger.kind == TriggerKind::kSlice) text += fmt::format(" after slice {}", t.trigger.index);
  return text;
}

Simulation::Simulation(std::span<const OverlapPlan* const> plans, const MachineProfile& machine,
                       const SimulationOptions& options)
    : plans_(plans),
      machine_(machine),
      options_(options),
      ranks_(plans.size()),
      network_(machine, static_cast<std::int64_t>(plans.size())) {
  std::map<const OverlapPlan*, std::shared_ptr<const GroupEnds>> shared;
  for (std::int64_t rank = 0; rank < static_cast<std::int64_t>(plans.size()); ++rank) make_rank(rank, shared);
}

void Simulation::make_rank(std::int64_t number,
                           std::map<const OverlapPlan*, std::shared_ptr<const GroupEnds>>& shared) {
  RankState& rank = ranks_[at(number)];
  const OverlapPlan& plan = *plans_[at(number)];
  rank.plan = &plan;
  std::unique_ptr<ComputeModel>& model = models_[&plan];
  if (!model) model = std::make_unique<ComputeModel>(plan, machine_);
  const double slow = slow_factor(options_, number);
  const Jitter jitter(options_.jitter, options_.seed, 2 * static_cast<std::uint64_t>(number));
  transfer_jitter_.emplace_back(options_.jitter, options_.seed, 2 * static_cast<std::uint64_t>(number) + 1);
  const bool is_alike = options_.jitter == 0 && slow == 1;
  std::shared_ptr<const GroupEnds> ends = is_alike ? shared[&plan] : nullptr;
  if (!ends) ends = std::make_shared<const GroupEnds>(group_ends(plan, *model, slow, jitter));
  if (is_alike) shared[&plan] = ends;
  for (const double end_us : ends->work_us) rank.alone_us = std::max(rank.alone_us, end_us);
  if (!plan.gates.empty() || in_timeline(number) || options_.walk_every_tile) {
    rank.compute = make_tile_compute(plan, *model, slow, jitter, static_cast<std::int32_t>(number),
                                     in_timeline(number) ? &timeline_ : nullptr);
  } else {
    rank.compute = make_planned_compute(std::move(ends));
  }
  rank.transfers.resize(plan.transfers.size());
  rank.transfers_left = static_cast<std::int64_t>(plan.transfers.size());
  rank.group_done_us.resize(plan.groups.size(), -1);
  rank.slice_from_rank.resize(plan.slices.size(), -1);
  rank.slice_from_transfer.resize(plan.slices.size(), -1);
  for (std::size_t t = 0; t < plan.transfers.size(); ++t) {
    rank.channels[plan.transfers[t].channel].transfers.push_back(static_cast<std::int64_t>(t));
    const Trigger& trigger = plan.transfers[t].trigger;
    const auto transfer = static_cast<std::int64_t>(t);
    switch (trigger.kind) {
      case TriggerKind::kStart:
        events_.push({.time_us = 0, .kind = EventKind::kTriggered, .rank = number, .index = transfer});
        break;
      case TriggerKind::kGroup:
        rank.group_triggers.emplace_back(trigger.index, transfer);
        break;
      case TriggerKind::kSlice:
        rank.slice_triggers.emplace_back(trigger.index, transfer);
        break;
    }
  }
  std::ranges::sort(rank.group_triggers);
  std::ranges::sort(rank.slice_triggers);
}

SimulationResult Simulation::run() {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    schedule_compute(ranks_[rank], static_cast<std::int64_t>(rank));
  }
  while (!events_.empty()) {
    const Event event = events_.pop();
    switch (event.kind) {
      case EventKind::kCompute:
        if (event.version == ranks_[at(event.rank)].compute_version) compute_event(event.rank, event.time_us);
        break;
      case EventKind::kTriggered:
        triggered(event.rank, event.index, event.time_us);
        break;
      case EventKind::kFlowEnd:
        if (flows_.contains(event.index) && network_.flow(event.index).version == event.version) {
          flow_end(event.index, event.time_us);
        }
        break;
    }
  }
  require_finished();
  finish_ranks();
  SimulationResult result;
  for (RankState& rank : ranks_) {
    result.total_us = std::max(result.total_us, rank.result.finish_us);
    result.ranks.push_back(rank.result);
  }
  result.num_events = events_.num_popped();
  result.critical_path = critical_path();
  result.timeline = std::move(timeline_);
  return result;
}

void Simulation::schedule_compute(RankState& rank, std::int64_t number) {
  ++rank.compute_version;
  const double work_us = rank.compute->next_work_us();
  if (work_us == std::numeric_limits<double>::infinity()) return;
  events_.push({.time_us = rank.clock.real_at(work_us),
                .kind = EventKind::kCompute,
                .rank = number,
                .version = rank.compute_version});
}

void Simulation::compute_event(std::int64_t number, double now_us) {
  RankState& rank = ranks_[at(number)];
  const double work_us = rank.compute->next_work_us();
  // All that happens at the same work time in one go: units that start together need no event each.
  while (rank.compute->next_work_us() == work_us) {
    for (const std::int64_t group : rank.compute->step(now_us)) group_done(number, group, now_us);
  }
  schedule_compute(rank, number);
}

void Simulation::group_done(std::int64_t number, std::int64_t group, double now_us) {
  RankState& rank = ranks_[at(number)];
  rank.group_done_us[at(group)] = now_us;
  if (rank.plan->groups[at(group)].num_tiles > 0) rank.last_tile_us = std::max(rank.last_tile_us, now_us);
  set_off(rank.group_triggers, number, group, now_us + machine_.signal_us);
}

/// The transfers of rank `number` that group or slice `index` triggers.
void Simulation::set_off(const std::vector<std::pair<std::int64_t, std::int64_t>>& triggers,
                         std::int64_t number, std::int64_t index, double time_us) {
  auto it = std::ranges::lower_bound(triggers, std::pair{index, std::int64_t{0}});
  for (; it != triggers.end() && it->first == index; ++it) {
    events_.push({.time_us = time_us, .kind = EventKind::kTriggered, .rank = number, .index = it->second});
  }
}

void Simulation::triggered(std::int64_t number, std::int64_t transfer, double now_us) {
  RankState& rank = ranks_[at(number)];
  rank.transfers[at(transfer)].triggered = true;
  rank.transfers[at(transfer)].triggered_us = now_us;
  issue_head(number, rank.plan->transfers[at(transfer)].channel, now_us);
}

void Simulation::issue_head(std::int64_t number, std::int32_t channel_number, double now_us) {
  RankState& rank = ranks_[at(number)];
  Channel& channel = rank.channels.at(channel_number);
  if (channel.head == channel.transfers.size()) return;
  const std::int64_t transfer = channel.transfers[channel.head];
  TransferState& state = rank.transfers[at(transfer)];
  if (!state.triggered || state.issued) return;
  state.issued = true;
  state.issued_us = now_us;
  issue(number, transfer, now_us);
}

void Simulation::issue(std::int64_t number, std::int64_t transfer, double now_us) {
  if (is_message(plans_[at(number)]->transfers[at(transfer)].kind)) {
    join_message(number, transfer, now_us);
  } else {
    join_collective(number, transfer, now_us);
  }
}

void Simulation::join_collective(std::int64_t number, std::int64_t transfer, double now_us) {
  RankState& rank = ranks_[at(number)];
  const Transfer& own = rank.plan->transfers[at(transfer)];
  Channel& channel = rank.channels.at(own.channel);
  const std::pair key{own.channel, channel.collectives_issued++};
  FlowMembers& meeting = meetings_[key];
  if (meeting.calls.empty()) meeting.kind = own.kind;
  if (meeting.kind != own.kind) {
    const auto& [first_rank, first_transfer] = meeting.calls.front();
    core::fail(ErrorKind::kBadArgument,
               "collective {} on channel {} is rank {}'s {} and rank {}'s {}: they must be the same",
               key.second, own.channel, first_rank, describe(*plans_[at(first_rank)], first_transfer), number,
               describe(*rank.plan, transfer));
  }
  meeting.calls.emplace_back(number, transfer);
  if (meeting.calls.size() < ranks_.size()) return;
  FlowMembers members = std::move(meeting);
  meetings_.erase(key);
  std::int64_t bytes = 0;
  for (const auto& [member, call] : members.calls) {
    bytes = std::max(bytes, curve_bytes(*plans_[at(member)], plans_[at(member)]->transfers[at(call)]));
  }
  begin_flow(std::move(members), bytes, -1, -1, static_cast<std::int32_t>(number), now_us);
}

void Simulation::join_message(std::int64_t number, std::int64_t transfer, double now_us) {
  const OverlapPlan& plan = *plans_[at(number)];
  const Transfer& own = plan.transfers[at(transfer)];
  if (own.peer < 0 || own.peer >= static_cast<std::int32_t>(plans_.size())) {
    core::fail(ErrorKind::kBadArgument, "rank {}'s transfer {} goes to rank {} of {}", number, transfer,
               own.peer, plans_.size());
  }
  const bool receives = own.kind == TransferKind::kReceive;
  const std::int64_t from = receives ? own.peer : number;
  const std::int64_t to = receives ? number : own.peer;
  const std::int64_t bytes = curve_bytes(plan, own);
  if (own.kind == TransferKind::kPut) {
    begin_flow({.kind = own.kind, .calls = {{number, transfer}}}, bytes, from, to, -1, now_us);
    return;
  }
  const TransferKind other_kind = receives ? TransferKind::kSend : TransferKind::kReceive;
  std::vector<std::int64_t>& others = waiting_messages_[{own.channel, from, to, other_kind}];
  if (others.empty()) {
    waiting_messages_[{own.channel, from, to, own.kind}].push_back(transfer);
    return;
  }
  const std::int64_t other_transfer = others.front();
  others.erase(others.begin());
  const std::int64_t other = own.peer;
  const std::int64_t other_bytes =
      curve_bytes(*plans_[at(other)], plans_[at(other)]->transfers[at(other_transfer)]);
  if (other_bytes != bytes) {
    core::fail(ErrorKind::kBadArgument, "rank {}'s {} has {} bytes, but rank {}'s {} has {}", number,
               describe(plan, transfer), bytes, other, describe(*plans_[at(other)], other_transfer),
               other_bytes);
  }
  begin_flow({.kind = TransferKind::kSend, .calls = {{number, transfer}, {other, other_transfer}}}, bytes,
             from, to, static_cast<std::int32_t>(number), now_us);
}

void Simulation::begin_flow(FlowMembers members, std::int64_t bytes, std::int64_t from, std::int64_t to,
                            std::int32_t last_rank, double now_us) {
  const OverlapPlan& plan = *plans_[at(members.calls.front().first)];
  const bool message = from >= 0;
  const std::int64_t units = plan.resources.communication_units;
  double alone_us = 0;
  if (bytes > 0 && from != to)
    alone_us = network_.message_us(members.kind, bytes, from, to, units, plan.dtype);
  if (bytes > 0 && !message) {
    alone_us = ranks_.size() < 2 ? 0 : network_.collective_us(members.kind, bytes, units, plan.dtype);
  }
  alone_us *= transfer_jitter_[at(members.calls.front().first)].factor();
  members.stolen_rate =
      alone_us > 0 ? machine_.steal_us_per_mib * static_cast<double>(bytes) / kMib / alone_us : 0;
  std::vector<std::int64_t> changed;
  const std::int64_t flow = message
                                ? network_.start_message(bytes, from, to, alone_us, now_us, changed)
                                : network_.start_collective(members.kind, bytes, alone_us, now_us, changed);
  for (const auto& [rank, transfer] : members.calls) {
    ranks_[at(rank)].transfers[at(transfer)].begin_us = now_us;
    ranks_[at(rank)].transfers[at(transfer)].last_rank = last_rank;
    set_busy(rank, 1, members.stolen_rate, now_us);
  }
  flows_.emplace(flow, std::move(members));
  push_ends(changed);
}

void Simulation::push_ends(const std::vector<std::int64_t>& changed) {
  for (const std::int64_t flow : changed) {
    events_.push({.time_us = network_.flow(flow).end_us,
                  .kind = EventKind::kFlowEnd,
                  .index = flow,
                  .version = network_.flow(flow).version});
  }
}

void Simulation::flow_end(std::int64_t flow, double now_us) {
  const FlowMembers members = std::move(flows_.at(flow));
  flows_.erase(flow);
  std::vector<std::int64_t> changed;
  network_.finish(flow, now_us, changed);
  push_ends(changed);
  for (const auto& [rank, transfer] : members.calls) set_busy(rank, -1, -members.stolen_rate, now_us);
  for (const auto& [rank, transfer] : members.calls) call_done(rank, transfer, now_us);
}

void Simulation::call_done(std::int64_t number, std::int64_t transfer, double now_us) {
  RankState& rank = ranks_[at(number)];
  const Transfer& own = rank.plan->transfers[at(transfer)];
  TransferState& state = rank.transfers[at(transfer)];
  state.done = true;
  state.end_us = now_us;
  --rank.transfers_left;
  const Payload payload = payload_bytes(*rank.plan, own);
  rank.result.sent_bytes += payload.sent;
  rank.result.received_bytes += payload.received;
  if (in_timeline(number)) record_transfer(number, transfer);
  ++rank.channels.at(own.channel).head;
  if (own.kind == TransferKind::kPut) {
    RankState& peer = ranks_[at(own.peer)];
    peer.result.received_bytes += payload.sent;
    if (own.slice >= static_cast<std::int64_t>(peer.plan->slices.size())) {
      core::fail(ErrorKind::kBadArgument, "rank {}'s {} marks slice {} at rank {}, which has {}", number,
                 describe(*rank.plan, transfer), own.slice, own.peer, peer.plan->slices.size());
    }
    if (own.slice >= 0) slice_arrived(own.peer, own.slice, number, transfer, now_us);
  } else if (own.slice >= 0) {
    slice_arrived(number, own.slice, number, transfer, now_us);
  }
  issue_head(number, own.channel, now_us);
}

void Simulation::slice_arrived(std::int64_t number, std::int64_t slice, std::int64_t from_rank,
                               std::int64_t from_transfer, double now_us) {
  RankState& rank = ranks_[at(number)];
  rank.slice_from_rank[at(slice)] = from_rank;
  rank.slice_from_transfer[at(slice)] = from_transfer;
  rank.compute->slice_arrived(slice, rank.clock.work_at(now_us), now_us);
  schedule_compute(rank, number);
  set_off(rank.slice_triggers, number, slice, now_us);
}

/// A transfer begins (flows = 1) or ends (-1) on a rank: its units slow down or recover.
void Simulation::set_busy(std::int64_t number, int flows, double stolen_rate, double now_us) {
  RankState& rank = ranks_[at(number)];
  if (rank.flows == 0) rank.communicating_since_us = now_us;
  rank.flows += flows;
  rank.stolen_rate = rank.flows == 0 ? 0 : std::max(0.0, rank.stolen_rate + stolen_rate);
  if (rank.flows == 0) rank.result.communicating_us += now_us - rank.communicating_since_us;
  if (machine_.slowdown == 1 && machine_.steal_us_per_mib == 0) return;
  const double rate = rank.flows == 0 ? 1 : std::max(kSlowestRate, 1 / machine_.slowdown - rank.stolen_rate);
  rank.clock.set_rate(rate, now_us);
  schedule_compute(rank, number);
}

void Simulation::finish_ranks() {
  for (std::size_t number = 0; number < ranks_.size(); ++number) {
    RankState& rank = ranks_[number];
    double finish_us = rank.last_tile_us;
    for (const TransferState& transfer : rank.transfers) finish_us = std::max(finish_us, transfer.end_us);
    const double restore = restore_us(*rank.plan, machine_);
    if (in_timeline(static_cast<std::int64_t>(number)) && restore > 0) {
      timeline_.spans.push_back({static_cast<std::int32_t>(number), "compute 0", "restore",
                                 SpanKind::kEpilogue, finish_us, finish_us + restore});
    }
    rank.result.finish_us = finish_us + restore;
    rank.result.compute_us = rank.last_tile_us;
    rank.result.exposed_us = rank.result.finish_us - rank.last_tile_us;
    rank.result.alone_us = rank.plan->schedule.empty() ? 0 : rank.alone_us;
    rank.result.exposed_communication_us = std::max(0.0, finish_us - rank.result.alone_us);
    const double capacity =
        rank.clock.work_at(rank.last_tile_us) * static_cast<double>(rank.plan->resources.compute_units);
    rank.result.idle_fraction =
        capacity > 0 ? std::clamp(1 - rank.compute->busy_us() / capacity, 0.0, 1.0) : 0;
  }
}

void Simulation::record_transfer(std::int64_t number, std::int64_t transfer) {
  const RankState& rank = ranks_[at(number)];
  const TransferState& state = rank.transfers[at(transfer)];
  const std::string track = fmt::format("stream {}", rank.plan->transfers[at(transfer)].channel);
  const std::string name = describe(*rank.plan, transfer);
  if (state.begin_us > state.issued_us) {
    timeline_.spans.push_back({static_cast<std::int32_t>(number), track, name + " waits for other ranks",
                               SpanKind::kWait, state.issued_us, state.begin_us});
  }
  timeline_.spans.push_back({static_cast<std::int32_t>(number), track, name, SpanKind::kCommunication,
                             state.begin_us, state.end_us});
}

}  // namespace flashoverlap::sim

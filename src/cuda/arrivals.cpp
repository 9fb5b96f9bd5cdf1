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
  if (transfer.trigger.kind != TriggerKind::kSlice) return;
  core::fail(ErrorKind::kUnsupported,
             "the GPU executor has no transfer set off by a slice yet; transfer {} of the plan of {} is one",
             index, plan.operation);
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

  /// The most messages between any two ranks, as far as this rank's plan says.
  [[nodiscard]] std::size_t most(const OverlapPlan& plan) const {
    std::size_t count = as_index(plan.messages_per_pair);
    for (const auto* lists : {&sends, &receives}) {
      for (const auto& list : *lists) count = std::max(count, list.size());
    }
    return count;
  }
};

TransferStep pair_step(const Pairs& pairs, std::size_t distance, std::size_t message) {
  TransferStep step;
  if (message < pairs.sends[distance].size()) step.send = pairs.sends[distance][message];
  if (message < pairs.receives[distance].size()) step.receive = pairs.receives[distance][message];
  return step;
}

void add_pairs(const OverlapPlan& plan, std::vector<TransferStep>& steps) {
  const Pairs pairs(plan);
  const std::size_t distances = pairs.sends.size() - 1;
  const std::size_t most = pairs.most(plan);
  const bool brings_blocks = plan.input_rows > 0;  // so it is on every rank, or nothing is sent at all
  for (std::size_t i = 0; i < distances * most; ++i) {
    const std::size_t distance = brings_blocks ? i % distances : i / most;
    const std::size_t message = brings_blocks ? i / distances : i % most;
    steps.push_back(pair_step(pairs, distance + 1, message));
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

/// By slice: how many have arrived once it has; 0: no step brings it.
std::vector<std::uint32_t> arrivals_of_slices(const OverlapPlan& plan,
                                              const std::vector<TransferStep>& steps) {
  std::vector<std::uint32_t> arrival_of(plan.slices.size(), 0);
  for (const TransferStep& step : steps) {
    if (!step.brings_slice) continue;
    const std::int64_t brings = step.collective >= 0 ? step.collective : step.receive;
    arrival_of[as_index(plan.transfers[as_index(brings)].slice)] = step.arrivals;
  }
  return arrival_of;
}

void check_gate(const OverlapPlan& plan, const Gate& gate, std::uint32_t arrival) {
  if (gate.point != plan.gates.front().point) {
    core::fail(
        ErrorKind::kUnsupported,
        "the GPU executor holds tiles at their start or at their end; the plan of {} has gates of both "
        "kinds",
        plan.operation);
  }
  if (arrival > 0) return;
  core::fail(ErrorKind::kUnsupported, "no receive and no collective of the plan of {} brings slice {}",
             plan.operation, gate.slice);
}

/// The input block that begins where the gate holds its tile.
std::int64_t block_of(const OverlapPlan& plan, const Gate& gate) {
  std::int64_t loop = 0;
  for (std::int64_t b = 0; b < std::ssize(plan.input_blocks) && loop <= gate.k_begin; ++b) {
    if (loop == gate.k_begin) return b;
    loop += plan.input_blocks[as_index(b)].depth;
  }
  if (gate.k_begin == 0) return 0;
  core::fail(
      ErrorKind::kUnsupported,
      "the GPU executor holds tiles where a block of A begins; tile {} of the plan of {} waits for slice {} "
      "from column {} on",
      gate.tile, plan.operation, gate.slice, gate.k_begin);
}

/// `needed`: by position and block. A unit computes the positions of its walk in order, so what comes before
/// the first tile with a gate waits for nothing.
void check_triggers(const OverlapPlan& plan, const std::vector<std::uint32_t>& needed, std::int64_t blocks) {
  const auto held = std::find_if(needed.begin(), needed.end(), [](std::uint32_t n) { return n > 0; });
  const std::int64_t first_held = (held - needed.begin()) / blocks;
  for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
    const Trigger& trigger = plan.transfers[i].trigger;
    if (trigger.kind != TriggerKind::kGroup) continue;
    const WaveGroup& group = plan.groups[as_index(trigger.index)];
    if (group.num_tiles == 0 || group.first_position + group.num_tiles <= first_held) continue;
    core::fail(
        ErrorKind::kUnsupported,
        "transfer {} of the plan of {} follows group {}, and position {}, in it or before it, waits for "
        "a slice: in one call with what others send here, the transfer could wait for a tile that waits "
        "for it",
        i, plan.operation, trigger.index, first_held);
  }
}

bool waits_for_all(const OverlapPlan& plan, const std::vector<std::uint32_t>& needed, std::int64_t blocks,
                   std::uint32_t arrivals) {
  for (std::size_t i = 0; i < needed.size(); i += as_index(blocks)) {
    if (needed[i] < arrivals) return false;
  }
  return std::ranges::all_of(
      plan.transfers, [](const Transfer& transfer) { return transfer.trigger.kind == TriggerKind::kStart; });
}

std::vector<std::int64_t> added_tiles(const OverlapPlan& plan) {
  const std::size_t others = as_index(plan.world_size - 1);
  std::vector<std::int64_t> of_tile(as_index(plan.grid.num_tiles()) * others, -1);
  std::vector<std::size_t> counts(as_index(plan.grid.num_tiles()), 0);
  for (const Gate& gate : plan.gates) {
    const std::int32_t source = plan.slices[as_index(gate.slice)].source;
    const std::size_t place =
        as_index(gate.tile) * others + as_index(source < plan.rank ? source : source - 1);
    if (source == plan.rank || of_tile[place] >= 0) {
      core::fail(
          ErrorKind::kUnsupported,
          "the GPU executor adds one tile of each other rank; tile {} of the plan of {} adds {} of rank "
          "{}",
          gate.tile, plan.operation, source == plan.rank ? "one" : "a second one", source);
    }
    of_tile[place] = gate.offset;
    ++counts[as_index(gate.tile)];
  }
  for (std::size_t tile = 0; tile < counts.size(); ++tile) {
    if (counts[tile] == 0 || counts[tile] == others) continue;
    core::fail(ErrorKind::kUnsupported,
               "the GPU executor adds one tile of each other rank; tile {} of the plan of {} adds {} of {}",
               tile, plan.operation, counts[tile], others);
  }
  std::vector<std::int64_t> added;
  added.reserve(plan.schedule.size() * others);
  for (const std::int64_t tile : plan.schedule) {
    const auto first = of_tile.begin() + tile * static_cast<std::int64_t>(others);
    added.insert(added.end(), first, first + static_cast<std::int64_t>(others));
  }
  return added;
}

}  // namespace

std::vector<TransferStep> transfer_steps(const OverlapPlan& plan) {
  std::vector<TransferStep> steps;
  for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
    check_transfer(plan, i);
    if (is_pairwise(plan.transfers[i]) || plan.transfers[i].kind == TransferKind::kPut) continue;
    steps.push_back({.channel = plan.transfers[i].channel, .collective = static_cast<std::int64_t>(i)});
  }
  add_pairs(plan, steps);
  count_arrivals(plan, steps);
  return steps;
}

GateTables gate_tables(const OverlapPlan& plan, const std::vector<TransferStep>& steps) {
  if (plan.gates.empty()) return {};
  const std::vector<std::uint32_t> arrival_of = arrivals_of_slices(plan, steps);
  const bool at_start = plan.gates.front().point == GatePoint::kStart;
  GateTables tables;
  if (at_start) tables.blocks = std::max<std::int64_t>(1, std::ssize(plan.input_blocks));
  std::vector<std::uint32_t> of_tile(as_index(plan.grid.num_tiles() * tables.blocks), 0);
  for (const Gate& gate : plan.gates) {
    check_gate(plan, gate, arrival_of[as_index(gate.slice)]);
    const std::int64_t block = at_start ? block_of(plan, gate) : 0;
    std::uint32_t& needed = of_tile[as_index(gate.tile * tables.blocks + block)];
    needed = std::max(needed, arrival_of[as_index(gate.slice)]);
  }
  std::vector<std::uint32_t> needed;
  needed.reserve(plan.schedule.size() * as_index(tables.blocks));
  for (const std::int64_t tile : plan.schedule) {
    const auto first = of_tile.begin() + tile * tables.blocks;
    needed.insert(needed.end(), first, first + tables.blocks);
  }
  check_triggers(plan, needed, tables.blocks);
  if (at_start) {
    tables.waits_for_all = waits_for_all(plan, needed, tables.blocks, steps.back().arrivals);
    tables.start = std::move(needed);
  } else {
    tables.finish = std::move(needed);
    tables.added = added_tiles(plan);
  }
  return tables;
}

std::int64_t tiles_to_begin(const OverlapPlan& plan, const GateTables& tables, std::int64_t turn) {
  const std::int64_t tiles = std::ssize(plan.schedule);
  if (tables.blocks < 2 || turn < 1 || turn > tiles || tables.start.front() > 0) return 0;
  const auto last_gate = [&](std::int64_t position) {
    return tables.start[as_index((position + 1) * tables.blocks - 1)];
  };
  std::int64_t first_strip = 1;
  while (first_strip < tiles && last_gate(first_strip) == last_gate(0)) ++first_strip;
  const std::int64_t own_depth = plan.input_blocks.front().depth;
  const std::int64_t as_long = first_strip * (plan.grid.k() - own_depth) / own_depth;
  return std::max(turn, std::min(as_long, tiles / 2) / turn * turn);
}

std::vector<std::uint32_t> start_with_begun(const GateTables& tables, std::int64_t begun) {
  std::vector<std::uint32_t> start(as_index(begun * tables.blocks), 0);
  for (std::int64_t p = 0; p < begun; ++p)
    start[as_index(p * tables.blocks)] = tables.start[as_index(p * tables.blocks)];
  start.insert(start.end(), tables.start.begin(), tables.start.end());
  return start;
}

}  // namespace flashoverlap::cuda

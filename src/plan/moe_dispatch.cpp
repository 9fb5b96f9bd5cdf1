#include <algorithm>
#include <numeric>

#include "plan/arithmetic.h"
#include "plan/builder.h"
#include "plan/moe_operations.h"
#include "plan/moe_world.h"
#include "plan/slices.h"

/// The first expert GEMM with the dispatch hidden behind it.
namespace flashoverlap {
namespace plan {
namespace {

/// Steps until the rows of `owner` come: every rank puts to its next one first.
std::int32_t steps_of(std::int32_t rank, std::int32_t owner, std::int32_t world_size) {
  return (rank - owner + world_size) % world_size;
}

/// Tiles whose rows are here or come first, first. Of equal ones those of one band stay together.
std::vector<std::int64_t> by_arrival(const OverlapPlan& plan, const MoeLayout& layout) {
  std::vector<std::int32_t> steps(index(plan.grid.num_tiles()), 0);
  std::size_t group = 0;
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    const Tile& tile = plan.grid.tile(t);
    while (layout.groups[group].row_begin + layout.groups[group].padded_rows <= tile.row_begin) ++group;
    for (std::size_t g = group;
         g < layout.groups.size() && layout.groups[g].row_begin < tile.row_begin + tile.rows; ++g) {
      if (layout.groups[g].rows == 0) continue;
      steps[index(t)] =
          std::max(steps[index(t)], steps_of(plan.rank, layout.groups[g].owner, plan.world_size));
    }
    // Tiles are in row order but for the columns of one band, which begin at the same row.
  }
  std::vector<std::size_t> next(index(plan.world_size) + 1, 0);  // place of the next tile of each step
  for (const std::int32_t step : steps) ++next[index(step) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<std::int64_t> order(steps.size());
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) order[next[index(steps[index(t)])]++] = t;
  return order;
}

/// Every tile waits for the slices whose rows it reads.
void add_gates(OverlapPlan& plan, std::int64_t k, bool all_wait) {
  if (all_wait) {  // no overlap: not even with this rank's own rows
    for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) plan.gates.push_back({.tile = t, .slice = 0});
    return;
  }
  struct Rows {
    std::int64_t begin;
    std::int64_t end;
    std::int64_t slice;
  };
  std::vector<Rows> rows;
  for (std::int64_t s = 0; s < std::ssize(plan.slices); ++s) {
    const Region& region = plan.slices[index(s)].region;
    if (region.count == 0) continue;
    rows.push_back({region.offset / k, (region.offset + region.count) / k, s});
  }
  std::ranges::sort(rows, {}, &Rows::begin);
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    const Tile& tile = plan.grid.tile(t);
    auto it = std::ranges::partition_point(rows, [&](const Rows& r) { return r.end <= tile.row_begin; });
    for (; it != rows.end() && it->begin < tile.row_begin + tile.rows; ++it) {
      plan.gates.push_back({.tile = t, .slice = it->slice, .point = GatePoint::kStart});
    }
  }
}

void dispatch_by_puts(MoeWorld& world, OverlapPlan& plan, std::int64_t k) {
  const MoeLayout& layout = world.layout(plan.rank);
  for (const MoeArrival& arrival : world.arrivals(plan.rank)) {
    plan.slices.push_back({arrival.owner, {BufferKind::kInput, arrival.row_begin * k, arrival.rows * k}});
  }
  const std::int64_t own_begin = [&] {
    std::int64_t rows = 0;
    for (std::int64_t e = 0; e < world.first_expert(plan.rank); ++e) rows += world.counts().at(plan.rank, e);
    return rows;
  }();
  PutChannels channels(plan);
  for (std::int32_t step = 1; step < plan.world_size; ++step) {
    const std::int32_t peer = (plan.rank + step) % plan.world_size;
    const std::vector<MoeArrival>& arrivals = world.arrivals(peer);
    auto it = std::ranges::lower_bound(arrivals, plan.rank, {}, &MoeArrival::owner);
    for (; it != arrivals.end() && it->owner == plan.rank; ++it) {
      // Send rows for this rank itself are not among those behind the expert rows.
      const std::int64_t skipped = it->owner_row > own_begin ? layout.own_rows : 0;
      const std::int64_t from = layout.rows + it->owner_row - skipped;
      plan.transfers.push_back({.kind = TransferKind::kPut,
                                .trigger = {},
                                .channel = channels.next(peer),
                                .peer = peer,
                                .source = {BufferKind::kInput, from * k, it->rows * k},
                                .destination = {BufferKind::kInput, it->row_begin * k, it->rows * k},
                                .send_counts = {},
                                .receive_counts = {},
                                .slice = it - arrivals.begin()});
    }
  }
  if (!plan.transfers.empty()) return;
  // Ranks open their memory to each other in calls that have puts, so all of them must have one.
  const Region nothing{BufferKind::kInput, 0, 0};
  plan.transfers.push_back({.kind = TransferKind::kPut,
                            .trigger = {},
                            .channel = 0,
                            .peer = plan.rank,
                            .source = nothing,
                            .destination = nothing,
                            .send_counts = {},
                            .receive_counts = {},
                            .slice = std::ssize(plan.slices)});
  plan.slices.push_back({plan.rank, nothing});
}

/// What this rank sends to and receives from each other one: regions of the input, by rank. The rows of one
/// owner lie together (order owner-major without padding), those of ranks in their order.
struct Exchanged {
  std::vector<Region> sent, received;
};

Exchanged exchanged_with_each(MoeWorld& world, const OverlapPlan& plan, std::int64_t k) {
  const auto rows_of = [&](std::int32_t owner, std::int32_t receiver) {
    std::int64_t rows = 0;
    for (std::int64_t e = world.first_expert(receiver); e < world.first_expert(receiver + 1); ++e)
      rows += world.counts().at(owner, e);
    return rows;
  };
  Exchanged exchanged;
  std::int64_t send_begin = world.layout(plan.rank).rows * k;
  std::int64_t receive_begin = 0;
  for (std::int32_t peer = 0; peer < plan.world_size; ++peer) {
    const std::int64_t sent = peer == plan.rank ? 0 : rows_of(plan.rank, peer) * k;
    const std::int64_t received = peer == plan.rank ? 0 : rows_of(peer, plan.rank) * k;
    exchanged.sent.push_back({BufferKind::kInput, send_begin, sent});
    exchanged.received.push_back({BufferKind::kInput, receive_begin, received});
    send_begin += sent;
    receive_begin += received;
  }
  return exchanged;
}

void dispatch_by_all_to_all(MoeWorld& world, OverlapPlan& plan, std::int64_t k) {
  const Exchanged exchanged = exchanged_with_each(world, plan, k);
  Transfer transfer{.kind = TransferKind::kAllToAll,
                    .trigger = {},
                    .source = {BufferKind::kInput, exchanged.sent.front().offset, 0},
                    .destination = {BufferKind::kInput, 0, 0},
                    .send_counts = {},
                    .receive_counts = {},
                    .slice = 0};
  for (std::int32_t peer = 0; peer < plan.world_size; ++peer) {
    transfer.send_counts.push_back(exchanged.sent[index(peer)].count);
    transfer.receive_counts.push_back(exchanged.received[index(peer)].count);
    transfer.source.count += transfer.send_counts.back();
    transfer.destination.count += transfer.receive_counts.back();
  }
  plan.slices.push_back({plan.rank, transfer.destination});
  plan.transfers.push_back(std::move(transfer));
}

/// One message for each pair of ranks, so that the rows of one owner need not wait for those of another.
void dispatch_by_messages(MoeWorld& world, OverlapPlan& plan, std::int64_t k) {
  const Exchanged exchanged = exchanged_with_each(world, plan, k);
  for (std::int32_t step = 1; step < plan.world_size; ++step) {
    const std::int32_t target = rank_after(plan.rank, step, plan.world_size);
    const std::int32_t source = rank_after(plan.rank, -step, plan.world_size);
    // Channels are of the sender: nothing that it sends waits for what it receives.
    plan.transfers.push_back({.kind = TransferKind::kSend,
                              .trigger = {},
                              .channel = plan.rank,
                              .peer = target,
                              .source = exchanged.sent[index(target)],
                              .destination = {},
                              .send_counts = {},
                              .receive_counts = {}});
    plan.transfers.push_back({.kind = TransferKind::kReceive,
                              .trigger = {},
                              .channel = source,
                              .peer = source,
                              .source = {},
                              .destination = exchanged.received[index(source)],
                              .send_counts = {},
                              .receive_counts = {},
                              .slice = std::ssize(plan.slices)});
    plan.slices.push_back({source, exchanged.received[index(source)]});
  }
}

}  // namespace

OverlapPlan moe_dispatch_plan(MoeWorld& world, std::int32_t rank, std::int64_t n, std::int64_t k) {
  const MoePlanOptions options = world.options_of(rank);
  const MoeLayout& layout = world.layout(rank);
  std::vector<Problem> problems = moe_problems(options, layout, n, true);
  // An empty problem at their end makes the send rows part of A.
  const std::int64_t send_end = layout.rows + layout.send_rows - layout.own_rows;
  problems.push_back({.row_begin = send_end, .rows = 0, .col_begin = 0, .cols = n, .weight = 0});
  PlanOptions shared;
  shared.rank = rank;
  shared.world_size = options.world_size;
  shared.dtype = options.dtype;
  shared.m = layout.rows;
  shared.n = n;
  shared.k = k;
  shared.resources = options.resources;
  OverlapPlan plan = start_plan(kMoeDispatch, shared, TileGrid(problems, k, options.tile_m, options.tile_n));
  plan.agreement = world.agreement(kMoeDispatch, n, k);
  plan.schedule = by_arrival(plan, layout);
  plan.groups.push_back({0, plan.grid.num_tiles()});
  if (options.world_size == 1) return plan;
  const bool serial = options.transport == MoeTransport::kCollective && options.collective_groups == 1;
  if (options.transport == MoeTransport::kPut) {
    dispatch_by_puts(world, plan, k);
  } else if (serial) {
    dispatch_by_all_to_all(world, plan, k);
  } else {
    dispatch_by_messages(world, plan, k);
  }
  if (k > 0) add_gates(plan, k, serial);
  return plan;
}

}  // namespace plan

OverlapPlan plan_moe_dispatch(const MoePlanOptions& options, const MoeCounts& counts, std::int64_t n,
                              std::int64_t k) {
  plan::MoeWorld world(options, counts);
  return plan::moe_dispatch_plan(world, options.rank, n, k);
}

std::vector<OverlapPlan> plan_moe_dispatch_all(const MoePlanOptions& options, const MoeCounts& counts,
                                               std::int64_t n, std::int64_t k) {
  plan::MoeWorld world(options, counts);
  std::vector<OverlapPlan> plans;
  for (std::int32_t rank = 0; rank < options.world_size; ++rank) {
    plans.push_back(plan::moe_dispatch_plan(world, rank, n, k));
  }
  return plans;
}

}  // namespace flashoverlap

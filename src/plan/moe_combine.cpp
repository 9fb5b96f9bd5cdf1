#include <algorithm>
#include <utility>

#include "plan/arithmetic.h"
#include "plan/builder.h"
#include "plan/moe_operations.h"
#include "plan/moe_world.h"

/// The second expert GEMM with the return of the results hidden behind it.
namespace flashoverlap {
namespace plan {
namespace {

/// Where the results for one band part lie in the received buffer: those of tile column c at offset[c].
struct ReceivedPart {
  std::int64_t send_row = 0;
  std::int64_t rows = 0;
  std::vector<std::int64_t> offset;
};

std::int64_t width(const OverlapPlan& plan, std::int64_t col) {
  return std::min(plan.grid.tile_n(), plan.output_cols - col * plan.grid.tile_n());
}

/// One restore band for each part, in the order of the send rows.
void restore_from(OverlapPlan& plan, std::vector<ReceivedPart>& parts) {
  std::ranges::sort(parts, {}, &ReceivedPart::send_row);
  plan.restore.source = BufferKind::kReceived;
  for (const ReceivedPart& part : parts) {
    plan.restore.bands.push_back(
        {part.send_row, part.rows, std::ssize(plan.restore.pieces), std::ssize(part.offset)});
    for (std::int64_t col = 0; col < std::ssize(part.offset); ++col) {
      plan.restore.pieces.push_back({col * plan.grid.tile_n(), width(plan, col), part.offset[index(col)]});
    }
  }
}

void receive_puts(MoeWorld& world, OverlapPlan& plan, std::int64_t tile_cols) {
  std::vector<ReceivedPart> parts;
  for (const MoeIncoming& incoming : world.incoming(plan.rank)) {
    const std::vector<PlacedBand>& bands = world.bands(incoming.source);
    const MoeRun& run = *incoming.run;
    // A run takes the place of its rows, whatever the order inside.
    std::int64_t next = world.received_row(plan.rank, run.destination_row) * plan.output_cols;
    plan.slices.push_back({incoming.source, {BufferKind::kReceived, next, run.rows * plan.output_cols}});
    for (const MoeRun::Member& member : run.parts) {
      const MoeBandPart& part = bands[member.band].band.parts[member.part];
      ReceivedPart& received = parts.emplace_back(ReceivedPart{part.destination_row, part.rows, {}});
      for (std::int64_t col = 0; col < tile_cols; ++col) {
        received.offset.push_back(next);
        next += part.rows * width(plan, col);
      }
    }
  }
  restore_from(plan, parts);
}

/// No rank needs to be told by this one: keeps the number of windows equal, see moe_dispatch.cpp.
void put_nothing(OverlapPlan& plan) {
  const Region packed{BufferKind::kPacked, 0, 0};
  const Region received{BufferKind::kReceived, 0, 0};
  plan.transfers.push_back({.kind = TransferKind::kPut,
                            .trigger = {},
                            .channel = 0,
                            .peer = plan.rank,
                            .source = packed,
                            .destination = received,
                            .send_counts = {},
                            .receive_counts = {},
                            .slice = std::ssize(plan.slices)});
  plan.slices.push_back({plan.rank, received});
}

}  // namespace

void combine_by_puts(MoeWorld& world, OverlapPlan& plan) {
  const MoePlanOptions options = world.options_of(plan.rank);
  const std::vector<PlacedBand>& bands = world.bands(plan.rank);
  const TileIndex tiles(plan.grid.problems(), plan.output_cols, options.tile_m, options.tile_n);
  plan.received_size = world.received_row(plan.rank, plan.output_rows) * plan.output_cols;
  receive_puts(world, plan, tiles.cols);
  std::map<std::int32_t, std::int64_t> next_slice;
  std::vector<std::vector<PlacementSegment>> placed(index(plan.grid.num_tiles()));
  PutChannels channels(plan);
  for (std::size_t s = 0; s < world.segments(plan.rank).size(); ++s) {
    const MoeSegment& segment = world.segments(plan.rank)[s];
    const auto group = static_cast<std::int64_t>(s);
    const std::int64_t first_position = std::ssize(plan.schedule);
    for (std::int64_t b = segment.first_band; b < segment.first_band + segment.num_bands; ++b) {
      for (std::int64_t col = 0; col < tiles.cols; ++col) {
        plan.schedule.push_back(tiles.tile(bands[index(b)], col));
      }
    }
    plan.groups.push_back({first_position, std::ssize(plan.schedule) - first_position});
    for (const MoeRun& run : world.runs(plan.rank)[s]) {
      const std::int64_t begin = plan.packed_size;
      for (const MoeRun::Member& member : run.parts) {
        const PlacedBand& band = bands[member.band];
        const MoeBandPart& part = band.band.parts[member.part];
        for (std::int64_t col = 0; col < tiles.cols; ++col) {
          placed[index(tiles.tile(band, col))].push_back(
              {part.row_begin - band.band.row_begin, part.rows, plan.packed_size});
          plan.packed_size += part.rows * width(plan, col);
        }
      }
      const auto [slice, fresh] = next_slice.try_emplace(run.destination, 0);
      if (fresh) slice->second = world.first_slice(plan.rank, run.destination);
      const std::int64_t count = plan.packed_size - begin;
      plan.transfers.push_back(
          {.kind = TransferKind::kPut,
           .trigger = {TriggerKind::kGroup, group},
           .channel = channels.next(run.destination),
           .peer = run.destination,
           .source = {BufferKind::kPacked, begin, count},
           .destination = {BufferKind::kReceived,
                           world.received_row(run.destination, run.destination_row) * plan.output_cols,
                           count},
           .send_counts = {},
           .receive_counts = {},
           .slice = slice->second++});
    }
  }
  PlacementBuilder placement(plan.grid.num_tiles());
  for (auto& segments : placed) {
    std::ranges::sort(segments, {}, &PlacementSegment::row_begin);  // runs need not begin in row order
    placement.add_tile(segments);
  }
  plan.placement = placement.take();
  if (plan.transfers.empty()) put_nothing(plan);
}

namespace {

/// The tiles of one rank in the order of its schedule.
struct ScheduledTile {
  const PlacedBand* band = nullptr;
  std::int64_t col = 0;
};

std::vector<ScheduledTile> scheduled_tiles(const std::vector<PlacedBand>& bands, std::int64_t tile_cols) {
  std::vector<ScheduledTile> tiles;
  for (const PlacedBand& band : bands) {
    for (std::int64_t col = 0; col < tile_cols; ++col) tiles.push_back({&band, col});
  }
  return tiles;
}

/// Tiles end at the end of their group, so a band has one owner.
const MoeBandPart& part_of(const ScheduledTile& tile) {
  return tile.band->band.parts.front();
}

/// Whether tiles write it straight to its place in the output: what stays here, with this transport all own
/// rows.
bool stays(const OverlapPlan& plan, const ScheduledTile& tile) {
  return part_of(tile).destination == plan.rank;
}

/// Packs group after group, in each rank after rank.
void pack_for_all_to_alls(OverlapPlan& plan, const std::vector<ScheduledTile>& schedule,
                          const TileIndex& tiles) {
  std::vector<std::vector<PlacementSegment>> placed(index(plan.grid.num_tiles()));
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const WaveGroup& group = plan.groups[g];
    const std::int64_t begin = plan.packed_size;
    std::vector<std::int64_t> counts(index(plan.world_size), 0);
    const auto members = std::span(schedule).subspan(index(group.first_position), index(group.num_tiles));
    for (const ScheduledTile& tile : members) {
      if (stays(plan, tile)) continue;
      counts[index(part_of(tile).destination)] += part_of(tile).rows * width(plan, tile.col);
    }
    std::vector<std::int64_t> next(counts.size());
    for (std::size_t d = 0; d < counts.size(); ++d) {
      next[d] = plan.packed_size;
      plan.packed_size += counts[d];
    }
    for (const ScheduledTile& tile : members) {
      if (stays(plan, tile)) continue;
      std::int64_t& offset = next[index(part_of(tile).destination)];
      placed[index(tiles.tile(*tile.band, tile.col))] = {{0, part_of(tile).rows, offset}};
      offset += part_of(tile).rows * width(plan, tile.col);
    }
    plan.transfers.push_back({.kind = TransferKind::kAllToAll,
                              .trigger = {TriggerKind::kGroup, static_cast<std::int64_t>(g)},
                              .source = {BufferKind::kPacked, begin, plan.packed_size - begin},
                              .destination = {BufferKind::kReceived, 0, 0},
                              .send_counts = std::move(counts),
                              .receive_counts = std::vector<std::int64_t>(index(plan.world_size), 0)});
  }
  PlacementBuilder placement(plan.grid.num_tiles());
  for (const auto& segments : placed) placement.add_tile(segments);
  plan.placement = placement.take();
}

}  // namespace

void combine_by_all_to_alls(MoeWorld& world, OverlapPlan& plan) {
  const MoePlanOptions options = world.options_of(plan.rank);
  const TileIndex tiles(plan.grid.problems(), plan.output_cols, options.tile_m, options.tile_n);
  std::vector<std::vector<ScheduledTile>> schedules;
  for (std::int32_t source = 0; source < plan.world_size; ++source) {
    schedules.push_back(scheduled_tiles(world.bands(source), tiles.cols));
  }
  const auto range_of = [&](std::int64_t size, std::int64_t g) {
    const std::int64_t begin = share_begin(size, options.collective_groups, g);
    return WaveGroup{begin, share_begin(size, options.collective_groups, g + 1) - begin};
  };
  const std::vector<ScheduledTile>& own = schedules[index(plan.rank)];
  for (const ScheduledTile& tile : own) plan.schedule.push_back(tiles.tile(*tile.band, tile.col));
  for (std::int64_t g = 0; g < options.collective_groups; ++g) {
    plan.groups.push_back(range_of(std::ssize(own), g));
  }
  pack_for_all_to_alls(plan, own, tiles);
  std::map<std::int64_t, ReceivedPart> parts;  // by send row
  for (std::int64_t g = 0; g < options.collective_groups; ++g) {
    Transfer& transfer = plan.transfers[index(g)];
    transfer.destination.offset = plan.received_size;
    for (std::size_t s = 0; s < schedules.size(); ++s) {
      if (std::cmp_equal(s, plan.rank)) continue;
      const WaveGroup range = range_of(std::ssize(schedules[s]), g);
      for (const ScheduledTile& tile :
           std::span(schedules[s]).subspan(index(range.first_position), index(range.num_tiles))) {
        const MoeBandPart& from = part_of(tile);
        if (from.destination != plan.rank) continue;
        ReceivedPart& part = parts.try_emplace(from.destination_row).first->second;
        part.send_row = from.destination_row;
        part.rows = from.rows;
        part.offset.push_back(plan.received_size);  // columns come in order
        const std::int64_t count = from.rows * width(plan, tile.col);
        transfer.receive_counts[s] += count;
        plan.received_size += count;
      }
    }
    transfer.destination.count = plan.received_size - transfer.destination.offset;
  }
  std::vector<ReceivedPart> in_order;
  for (auto& [row, part] : parts) in_order.push_back(std::move(part));
  restore_from(plan, in_order);
}

OverlapPlan moe_combine_plan(MoeWorld& world, std::int32_t rank, std::int64_t n, std::int64_t k) {
  const MoePlanOptions options = world.options_of(rank);
  const MoeLayout& layout = world.layout(rank);
  PlanOptions shared;
  shared.rank = rank;
  shared.world_size = options.world_size;
  shared.dtype = options.dtype;
  shared.m = layout.send_rows;
  shared.n = n;
  shared.k = k;
  shared.resources = options.resources;
  OverlapPlan plan =
      start_plan(kMoeCombine, shared,
                 TileGrid(moe_problems(options, layout, n, false), k, options.tile_m, options.tile_n));
  plan.agreement = world.agreement(kMoeCombine, n, k);
  plan.output_row_shift = world.own_rows(rank).shift;
  if (options.world_size > 1) {
    options.transport == MoeTransport::kPut ? combine_by_puts(world, plan)
                                            : combine_by_all_to_alls(world, plan);
    return plan;
  }
  // The expert rows of the only rank are its send rows.
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) plan.schedule.push_back(t);
  plan.groups.push_back({0, plan.grid.num_tiles()});
  return plan;
}

}  // namespace plan

OverlapPlan plan_moe_combine(const MoePlanOptions& options, const MoeCounts& counts, std::int64_t n,
                             std::int64_t k) {
  plan::MoeWorld world(options, counts);
  return plan::moe_combine_plan(world, options.rank, n, k);
}

std::vector<OverlapPlan> plan_moe_combine_all(const MoePlanOptions& options, const MoeCounts& counts,
                                              std::int64_t n, std::int64_t k) {
  plan::MoeWorld world(options, counts);
  std::vector<OverlapPlan> plans;
  for (std::int32_t rank = 0; rank < options.world_size; ++rank) {
    plans.push_back(plan::moe_combine_plan(world, rank, n, k));
  }
  return plans;
}

}  // namespace flashoverlap

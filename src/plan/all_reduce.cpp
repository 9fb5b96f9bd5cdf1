#include <utility>

#include "flashoverlap/plan_builders.h"
#include "plan/agreement.h"
#include "plan/arithmetic.h"
#include "plan/builder.h"

namespace flashoverlap {
namespace {

/// One group: nothing to overlap, so the output itself is reduced, without packing and restoring it.
void reduce_in_place(OverlapPlan& plan) {
  const Region output{BufferKind::kOutput, 0, plan.output_rows * plan.output_cols};
  plan.transfers.push_back({.kind = TransferKind::kAllReduce,
                            .trigger = {TriggerKind::kGroup, 0},
                            .source = output,
                            .destination = output,
                            .send_counts = {},
                            .receive_counts = {}});
}

/// Whole tiles in schedule order; returns each tile's offset.
std::vector<std::int64_t> pack_tiles(OverlapPlan& plan) {
  std::vector<std::int64_t> offset_of_tile(plan.schedule.size());
  for (const std::int64_t tile : plan.schedule) {
    offset_of_tile[plan::index(tile)] = plan.packed_size;
    plan.packed_size += plan.grid.tile(tile).size();
  }
  plan::PlacementBuilder placement(plan.grid.num_tiles());
  for (std::int64_t tile = 0; tile < plan.grid.num_tiles(); ++tile) {
    const PlacementSegment whole{0, plan.grid.tile(tile).rows, offset_of_tile[plan::index(tile)]};
    placement.add_tile({&whole, 1});
  }
  plan.placement = placement.take();
  return offset_of_tile;
}

void reduce_groups(OverlapPlan& plan) {
  std::int64_t offset = 0;
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    std::int64_t count = 0;
    for (const std::int64_t tile : plan::tiles_of(plan, plan.groups[g])) count += plan.grid.tile(tile).size();
    const Region region{BufferKind::kPacked, offset, count};
    plan.transfers.push_back({.kind = TransferKind::kAllReduce,
                              .trigger = {TriggerKind::kGroup, static_cast<std::int64_t>(g)},
                              .source = region,
                              .destination = region,
                              .send_counts = {},
                              .receive_counts = {}});
    offset += count;
  }
}

/// One band per tile row, one piece per tile.
void restore_tiles(OverlapPlan& plan, const std::vector<std::int64_t>& offset_of_tile) {
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    const Tile& tile = plan.grid.tile(t);
    if (tile.col_begin == 0) {
      plan.restore.bands.push_back(
          {tile.row_begin, tile.rows, static_cast<std::int64_t>(plan.restore.pieces.size()), 0});
    }
    plan.restore.pieces.push_back({tile.col_begin, tile.cols, offset_of_tile[plan::index(t)]});
    ++plan.restore.bands.back().num_pieces;
  }
}

}  // namespace

OverlapPlan plan_all_reduce(const PlanOptions& options) {
  constexpr std::string_view kOperation = "gemm-all-reduce";
  const std::vector<std::int64_t> partition = plan::resolve_partition(options, num_waves(options));
  OverlapPlan plan = plan::start_plan(
      kOperation, options,
      TileGrid({{.rows = options.m, .cols = options.n}}, options.k, options.tile_m, options.tile_n));
  plan.agreement = plan::hash_options(kOperation, options, partition).value();
  plan.schedule = swizzled_order(plan::ceil_div(options.m, options.tile_m),
                                 plan::ceil_div(options.n, options.tile_n), options.swizzle);
  plan.groups = plan::make_groups(partition, plan.grid.num_tiles(), options.resources.compute_units);
  if (options.world_size == 1 || plan.groups.empty()) return plan;
  if (plan.groups.size() == 1) {
    reduce_in_place(plan);
    return plan;
  }
  const std::vector<std::int64_t> offset_of_tile = pack_tiles(plan);
  reduce_groups(plan);
  restore_tiles(plan, offset_of_tile);
  return plan;
}

}  // namespace flashoverlap

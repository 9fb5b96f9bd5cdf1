#include <algorithm>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/plan_builders.h"
#include "plan/agreement.h"
#include "plan/arithmetic.h"
#include "plan/builder.h"

namespace flashoverlap {
namespace {

using plan::index;
using plan::share_begin;

constexpr std::string_view kOperation = "gemm-reduce-scatter";

/// Rows [begin, begin + rows) of a tile belong to `owner`.
struct Slab {
  std::int64_t owner = 0;
  std::int64_t begin = 0;
  std::int64_t rows = 0;
};

/// A tile's slabs by owner, without empty ones. Contiguous: each problem has one owner, and so has the whole
/// tile.
std::vector<Slab> slabs_of(const Tile& tile, std::int64_t world_size, RowOwnership rows) {
  if (rows == RowOwnership::kContiguous) return {{tile.problem, 0, tile.rows}};
  std::vector<Slab> slabs;
  for (std::int64_t owner = 0; owner < world_size; ++owner) {
    const std::int64_t begin = share_begin(tile.rows, world_size, owner);
    const std::int64_t end = share_begin(tile.rows, world_size, owner + 1);
    if (begin < end) slabs.push_back({owner, begin, end - begin});
  }
  return slabs;
}

/// One problem per owner of rows [begins[r], begins[r + 1]), so that no tile straddles two.
TileGrid grid_of_owners(const PlanOptions& options, const std::vector<std::int64_t>& begins) {
  std::vector<Problem> problems;
  for (std::size_t owner = 0; owner + 1 < begins.size(); ++owner) {
    problems.push_back(
        {.row_begin = begins[owner], .rows = begins[owner + 1] - begins[owner], .cols = options.n});
  }
  return TileGrid(std::move(problems), options.k, options.tile_m, options.tile_n);
}

/// Swizzled inside each problem; problems take turns, tile by tile, so that every run of consecutive tiles
/// holds about equal shares for all owners.
std::vector<std::int64_t> schedule_in_turn(const TileGrid& grid, std::int64_t swizzle) {
  std::vector<std::vector<std::int64_t>> order_of_problem;
  std::size_t longest = 0;
  std::int64_t first_tile = 0;
  for (const Problem& p : grid.problems()) {
    auto order = swizzled_order(p.cols == 0 ? 0 : plan::ceil_div(p.rows, grid.tile_m()),
                                plan::ceil_div(p.cols, grid.tile_n()), swizzle);
    for (std::int64_t& tile : order) tile += first_tile;
    first_tile += static_cast<std::int64_t>(order.size());
    longest = std::max(longest, order.size());
    order_of_problem.push_back(std::move(order));
  }
  std::vector<std::int64_t> schedule;
  schedule.reserve(index(first_tile));
  for (std::size_t i = 0; i < longest; ++i) {
    for (const auto& order : order_of_problem) {
      if (i < order.size()) schedule.push_back(order[i]);
    }
  }
  return schedule;
}

/// Lays out the packed buffer: group by group, in a group owner by owner, in a chunk by schedule position;
/// adds a group's transfer on the way. The result holds each tile's slabs.
class Packer {
 public:
  Packer(OverlapPlan& plan, RowOwnership rows) : plan_(plan), rows_(rows), segments_(plan.schedule.size()) {}

  /// Returns this rank's segment of each tile, in tile order; a tile without one has rows 0.
  std::vector<PlacementSegment> pack() {
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) pack_group(static_cast<std::int64_t>(g));
    std::vector<PlacementSegment> own(segments_.size());
    plan::PlacementBuilder placement(plan_.grid.num_tiles());
    for (std::size_t t = 0; t < segments_.size(); ++t) {
      const std::vector<Slab> slabs = slabs_of(plan_.grid.tiles()[t], plan_.world_size, rows_);
      for (std::size_t s = 0; s < slabs.size(); ++s) {
        if (slabs[s].owner == plan_.rank) own[t] = segments_[t][s];
      }
      placement.add_tile(segments_[t]);
    }
    plan_.placement = placement.take();
    return own;
  }

 private:
  void pack_group(std::int64_t g) {
    const auto tiles = plan::tiles_of(plan_, plan_.groups[index(g)]);
    std::vector<std::int64_t> counts(index(plan_.world_size), 0);
    for (const std::int64_t t : tiles) {
      for (const Slab& slab : slabs_of(plan_.grid.tile(t), plan_.world_size, rows_)) {
        counts[index(slab.owner)] += slab.rows * plan_.grid.tile(t).cols;
      }
    }
    add_transfer(g, counts);

    std::vector<std::int64_t> next(counts.size());
    for (std::size_t owner = 0; owner < counts.size(); ++owner) {
      next[owner] = plan_.packed_size;
      plan_.packed_size += counts[owner];
    }
    for (const std::int64_t t : tiles) {
      for (const Slab& slab : slabs_of(plan_.grid.tile(t), plan_.world_size, rows_)) {
        segments_[index(t)].push_back({slab.begin, slab.rows, next[index(slab.owner)]});
        next[index(slab.owner)] += slab.rows * plan_.grid.tile(t).cols;
      }
    }
  }

  void add_transfer(std::int64_t g, const std::vector<std::int64_t>& counts) {
    Region source{BufferKind::kPacked, plan_.packed_size, 0};
    Region own{BufferKind::kPacked, plan_.packed_size, counts[index(plan_.rank)]};
    for (std::int32_t owner = 0; owner < plan_.world_size; ++owner) {
      source.count += counts[index(owner)];
      if (owner < plan_.rank) own.offset += counts[index(owner)];
    }
    const bool equal =
        std::ranges::all_of(counts, [&](std::int64_t count) { return count == counts.front(); });
    plan_.transfers.push_back({.kind = TransferKind::kReduceScatter,
                               .trigger = {TriggerKind::kGroup, g},
                               .source = source,
                               .destination = own,
                               .send_counts = equal ? std::vector<std::int64_t>{} : counts,
                               .receive_counts = {}});
  }

  OverlapPlan& plan_;
  RowOwnership rows_;
  std::vector<std::vector<PlacementSegment>> segments_;
};

/// Tiles in row-major order of D give this rank's rows in ascending order: one band per tile row that it has
/// part of.
void restore_own(OverlapPlan& plan, const std::vector<PlacementSegment>& own) {
  std::int64_t output_row = 0;
  std::int64_t rows = 0;
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    const PlacementSegment& segment = own[index(t)];
    if (segment.rows == 0) continue;
    const Tile& tile = plan.grid.tile(t);
    if (tile.col_begin == 0) {
      output_row += rows;
      rows = segment.rows;
      plan.restore.bands.push_back(
          {output_row, rows, static_cast<std::int64_t>(plan.restore.pieces.size()), 0});
    }
    plan.restore.pieces.push_back({tile.col_begin, tile.cols, segment.offset});
    ++plan.restore.bands.back().num_pieces;
  }
}

std::int64_t count_owned_slabs(const PlanOptions& options) {
  const auto owned_of = [&](std::int64_t height) {
    return share_begin(height, options.world_size, options.rank + 1) -
           share_begin(height, options.world_size, options.rank);
  };
  return options.m / options.tile_m * owned_of(options.tile_m) + owned_of(options.m % options.tile_m);
}

/// Schedule, groups, placement, transfers and restore of a plan that has its grid.
OverlapPlan complete(OverlapPlan plan, const PlanOptions& options, RowOwnership rows,
                     const std::vector<std::int64_t>& partition) {
  plan.schedule = schedule_in_turn(plan.grid, options.swizzle);
  plan.groups = plan::make_groups(partition, plan.grid.num_tiles(), options.resources.compute_units);
  if (options.world_size == 1) return plan;
  restore_own(plan, Packer(plan, rows).pack());
  return plan;
}

OverlapPlan plan_contiguous(const PlanOptions& options, const SliceOptions& slices) {
  const std::vector<std::int64_t> partition =
      plan::resolve_partition(options, num_waves_reduce_scatter(options, slices));
  const std::vector<std::int64_t> begins = slice_begins(slices, options.m, options.world_size);
  OverlapPlan plan = plan::start_plan(kOperation, options, grid_of_owners(options, begins));
  plan::AgreementHash hash = plan::hash_options(kOperation, options, partition);
  hash.add(name_of(RowOwnership::kContiguous));
  if (!slices.sizes.empty()) hash.add(std::span(begins));
  plan.agreement = hash.value();
  plan.output_rows = begins[index(options.rank + 1)] - begins[index(options.rank)];
  return complete(std::move(plan), options, RowOwnership::kContiguous, partition);
}

}  // namespace

std::string_view name_of(RowOwnership rows) {
  return rows == RowOwnership::kContiguous ? "contiguous" : "block-cyclic";
}

std::vector<std::int64_t> owned_rows(std::int64_t m, std::int64_t tile_m, std::int32_t world_size,
                                     std::int32_t rank, RowOwnership rows) {
  plan::check_options(
      {.rank = rank, .world_size = world_size, .m = m, .tile_m = tile_m, .resources = {}, .partition = {}});
  std::vector<std::int64_t> owned;
  const auto add_share = [&](std::int64_t begin, std::int64_t height) {
    const std::int64_t end = begin + share_begin(height, world_size, rank + 1);
    for (std::int64_t row = begin + share_begin(height, world_size, rank); row < end; ++row)
      owned.push_back(row);
  };
  if (rows == RowOwnership::kContiguous) {
    add_share(0, m);
  } else {
    for (std::int64_t left = m; left > 0; left -= std::min(tile_m, left))
      add_share(m - left, std::min(tile_m, left));
  }
  return owned;
}

std::int64_t num_waves_reduce_scatter(const PlanOptions& options, const SliceOptions& slices) {
  plan::check_options(options);
  const std::vector<std::int64_t> begins = slice_begins(slices, options.m, options.world_size);
  std::int64_t tiles = 0;
  for (std::size_t owner = 0; owner + 1 < begins.size(); ++owner) {
    tiles += plan::count_tiles(begins[owner + 1] - begins[owner], options.n, options.tile_m, options.tile_n);
  }
  return plan::ceil_div(tiles, options.resources.compute_units);
}

OverlapPlan plan_reduce_scatter(const PlanOptions& options, const SliceOptions& slices) {
  return plan_contiguous(options, slices);
}

OverlapPlan plan_reduce_scatter(const PlanOptions& options, RowOwnership rows) {
  if (rows == RowOwnership::kContiguous) return plan_contiguous(options, SliceOptions{});
  const std::vector<std::int64_t> partition = plan::resolve_partition(options, num_waves(options));
  OverlapPlan plan = plan::start_plan(
      kOperation, options,
      TileGrid({{.rows = options.m, .cols = options.n}}, options.k, options.tile_m, options.tile_n));
  plan::AgreementHash hash = plan::hash_options(kOperation, options, partition);
  hash.add(name_of(rows));
  plan.agreement = hash.value();
  plan.output_rows = count_owned_slabs(options);
  return complete(std::move(plan), options, rows, partition);
}

}  // namespace flashoverlap

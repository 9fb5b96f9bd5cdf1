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

constexpr std::string_view kOperation = "gemm-all-to-all";

void check_routing(const PlanOptions& options, const Routing& routing) {
  if (std::ssize(routing.destinations) != options.world_size) {
    core::fail(ErrorKind::kBadArgument, "routing has destinations for {} ranks, but world_size is {}",
               routing.destinations.size(), options.world_size);
  }
  for (std::size_t source = 0; source < routing.destinations.size(); ++source) {
    const auto& destinations = routing.destinations[source];
    for (std::size_t row = 0; row < destinations.size(); ++row) {
      if (destinations[row] < 0 || destinations[row] >= options.world_size) {
        core::fail(ErrorKind::kBadArgument, "destination {} of row {} of rank {} is not a rank in [0, {})",
                   destinations[row], row, source, options.world_size);
      }
    }
  }
}

/// The part of one rank's plan that every other rank can work out from the routing: its schedule and groups.
struct SourceSchedule {
  std::int64_t tile_rows = 0;
  std::int64_t tile_cols = 0;
  std::vector<std::int64_t> order;
  std::vector<WaveGroup> groups;
};

SourceSchedule schedule_of(const PlanOptions& options, std::int64_t m,
                           const std::vector<std::int64_t>& partition) {
  SourceSchedule s;
  s.tile_rows = options.n == 0 ? 0 : plan::ceil_div(m, options.tile_m);
  s.tile_cols = plan::ceil_div(options.n, options.tile_n);
  s.order = swizzled_order(s.tile_rows, s.tile_cols, options.swizzle);
  const auto num_tiles = static_cast<std::int64_t>(s.order.size());
  const std::int64_t units = options.resources.compute_units;
  s.groups =
      plan::make_groups(plan::scale_partition(partition, plan::ceil_div(num_tiles, units)), num_tiles, units);
  return s;
}

/// Runs of rows with one destination inside each tile row, the unit that a placement segment holds.
struct Run {
  std::int64_t row_begin = 0;  ///< Inside the tile.
  std::int64_t rows = 0;
  std::int64_t destination = 0;
};

std::vector<std::vector<Run>> runs_of(const std::vector<std::int32_t>& destinations, std::int64_t tile_m) {
  std::vector<std::vector<Run>> runs;
  for (std::size_t row = 0; row < destinations.size(); ++row) {
    const std::int64_t in_tile = static_cast<std::int64_t>(row) % tile_m;
    if (in_tile == 0) runs.emplace_back();
    if (in_tile == 0 || runs.back().back().destination != destinations[row]) {
      runs.back().push_back({in_tile, 0, destinations[row]});
    }
    ++runs.back().back().rows;
  }
  return runs;
}

/// rows[tile row][destination] of one source.
std::vector<std::vector<std::int64_t>> count_rows(const std::vector<std::vector<Run>>& runs,
                                                  std::int64_t world_size) {
  std::vector<std::vector<std::int64_t>> counts(runs.size(), std::vector<std::int64_t>(index(world_size), 0));
  for (std::size_t tile_row = 0; tile_row < runs.size(); ++tile_row) {
    for (const Run& run : runs[tile_row]) counts[tile_row][index(run.destination)] += run.rows;
  }
  return counts;
}

/// The sending side: a group's packed data holds the rows for rank 0, then those for rank 1, …; inside a
/// chunk by schedule position and then by row.
void pack(OverlapPlan& plan, const SourceSchedule& source, const std::vector<std::int32_t>& destinations) {
  const auto runs = runs_of(destinations, plan.grid.tile_m());
  const auto rows = count_rows(runs, plan.world_size);
  std::vector<std::vector<PlacementSegment>> segments(source.order.size());
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const auto tiles = plan::tiles_of(plan, plan.groups[g]);
    std::vector<std::int64_t> counts(index(plan.world_size), 0);
    for (const std::int64_t t : tiles) {
      const auto& rows_for = rows[index(t / source.tile_cols)];
      for (std::size_t d = 0; d < counts.size(); ++d) counts[d] += rows_for[d] * plan.grid.tile(t).cols;
    }
    std::vector<std::int64_t> next(counts.size());
    const std::int64_t begin = plan.packed_size;
    for (std::size_t d = 0; d < counts.size(); ++d) {
      next[d] = plan.packed_size;
      plan.packed_size += counts[d];
    }
    for (const std::int64_t t : tiles) {
      for (const Run& run : runs[index(t / source.tile_cols)]) {
        segments[index(t)].push_back({run.row_begin, run.rows, next[index(run.destination)]});
        next[index(run.destination)] += run.rows * plan.grid.tile(t).cols;
      }
    }
    plan.transfers.push_back({.kind = TransferKind::kAllToAll,
                              .trigger = {TriggerKind::kGroup, static_cast<std::int64_t>(g)},
                              .source = {BufferKind::kPacked, begin, plan.packed_size - begin},
                              .destination = {BufferKind::kReceived, 0, 0},
                              .send_counts = std::move(counts),
                              .receive_counts = std::vector<std::int64_t>(index(plan.world_size), 0)});
  }
  plan::PlacementBuilder placement(plan.grid.num_tiles());
  for (const auto& of_tile : segments) placement.add_tile(of_tile);
  plan.placement = placement.take();
}

/// Where rows for this rank lie in what one source sends: tile (row, col) of the source's grid is at
/// offset[row * tile_cols + col] of the received buffer.
struct Arrival {
  std::int64_t tile_cols = 0;
  std::vector<std::int64_t> rows_for_me;  ///< Per tile row.
  std::vector<std::int64_t> offset;       ///< Per tile.
};

std::vector<std::int64_t> rows_per_tile_row(const std::vector<std::int32_t>& destinations,
                                            std::int64_t tile_m, std::int32_t rank) {
  std::vector<std::int64_t> rows(index(plan::ceil_div(std::ssize(destinations), tile_m)), 0);
  for (std::size_t row = 0; row < destinations.size(); ++row) {
    if (destinations[row] == rank) ++rows[row / index(tile_m)];
  }
  return rows;
}

/// The receiving side: the received buffer holds group after group, in a group source after source.
class Receiver {
 public:
  Receiver(OverlapPlan& plan, const PlanOptions& options, const Routing& routing,
           const std::vector<std::int64_t>& partition)
      : plan_(plan) {
    for (const auto& destinations : routing.destinations) {
      sources_.push_back(schedule_of(options, std::ssize(destinations), partition));
      arrivals_.push_back({sources_.back().tile_cols,
                           rows_per_tile_row(destinations, options.tile_m, plan.rank),
                           std::vector<std::int64_t>(sources_.back().order.size(), 0)});
    }
  }

  void receive() {
    for (std::size_t g = 0; g < plan_.transfers.size(); ++g) receive_group(g);
    restore();
  }

 private:
  void receive_group(std::size_t g) {
    Transfer& transfer = plan_.transfers[g];
    transfer.destination.offset = plan_.received_size;
    for (std::size_t s = 0; s < sources_.size(); ++s) {
      const WaveGroup& group = sources_[s].groups[g];
      const std::int64_t begin = plan_.received_size;
      for (std::int64_t p = group.first_position; p < group.first_position + group.num_tiles; ++p) {
        const std::int64_t tile = sources_[s].order[index(p)];
        arrivals_[s].offset[index(tile)] = plan_.received_size;
        plan_.received_size += arrivals_[s].rows_for_me[index(tile / sources_[s].tile_cols)] *
                               width(tile % sources_[s].tile_cols);
      }
      transfer.receive_counts[s] = plan_.received_size - begin;
    }
    transfer.destination.count = plan_.received_size - transfer.destination.offset;
  }

  /// Rows that one tile row of one source has for this rank lie densely in each of its tiles: one band.
  void restore() {
    plan_.restore.source = BufferKind::kReceived;
    std::int64_t output_row = 0;
    for (const Arrival& arrival : arrivals_) {
      for (std::size_t tile_row = 0; tile_row < arrival.rows_for_me.size(); ++tile_row) {
        const std::int64_t rows = arrival.rows_for_me[tile_row];
        if (rows == 0 || arrival.tile_cols == 0) continue;
        plan_.restore.bands.push_back(
            {output_row, rows, static_cast<std::int64_t>(plan_.restore.pieces.size()), arrival.tile_cols});
        for (std::int64_t col = 0; col < arrival.tile_cols; ++col) {
          plan_.restore.pieces.push_back({col * plan_.grid.tile_n(), width(col),
                                          arrival.offset[tile_row * index(arrival.tile_cols) + index(col)]});
        }
        output_row += rows;
      }
    }
  }

  [[nodiscard]] std::int64_t width(std::int64_t tile_col) const {
    return std::min(plan_.grid.tile_n(), plan_.output_cols - tile_col * plan_.grid.tile_n());
  }

  OverlapPlan& plan_;
  std::vector<SourceSchedule> sources_;
  std::vector<Arrival> arrivals_;
};

std::uint64_t hash_routing(const PlanOptions& options, const Routing& routing,
                           const std::vector<std::int64_t>& partition) {
  PlanOptions same_on_all_ranks = options;
  same_on_all_ranks.m = 0;  // Ignored; the routing has it.
  plan::AgreementHash hash = plan::hash_options(kOperation, same_on_all_ranks, partition);
  for (const auto& destinations : routing.destinations) hash.add(std::span(destinations));
  return hash.value();
}

/// options.m of this rank and of the rank with the most rows.
std::pair<PlanOptions, PlanOptions> with_rows(const PlanOptions& options, const Routing& routing) {
  PlanOptions own = options;
  own.m = 0;
  plan::check_options(own);
  check_routing(own, routing);
  own.m = std::ssize(routing.destinations[index(own.rank)]);
  PlanOptions longest = own;
  std::int64_t total = 0;
  for (const auto& destinations : routing.destinations) {
    longest.m = std::max(longest.m, std::ssize(destinations));
    total += std::ssize(destinations);
  }
  plan::check_matrix("rows of all ranks", total, "n", own.n, own.dtype);
  return {std::move(own), std::move(longest)};
}

}  // namespace

std::int64_t Routing::rows(std::int32_t source, std::int32_t rank) const {
  return std::ranges::count(destinations[index(source)], rank);
}

OverlapPlan plan_all_to_all(const PlanOptions& options, const Routing& routing) {
  const auto [own, longest] = with_rows(options, routing);
  const std::vector<std::int64_t> partition = plan::resolve_partition(longest, num_waves(longest));
  OverlapPlan plan = plan::start_plan(
      kOperation, own, TileGrid({{.rows = own.m, .cols = own.n}}, own.k, own.tile_m, own.tile_n));
  plan.agreement = hash_routing(own, routing, partition);
  const auto& destinations = routing.destinations[index(own.rank)];
  SourceSchedule schedule = schedule_of(own, own.m, partition);
  plan.schedule = schedule.order;
  plan.groups = schedule.groups;
  if (own.world_size == 1) return plan;
  plan.output_rows = 0;
  for (std::int32_t source = 0; source < own.world_size; ++source)
    plan.output_rows += routing.rows(source, own.rank);
  pack(plan, schedule, destinations);
  Receiver(plan, own, routing, partition).receive();
  return plan;
}

}  // namespace flashoverlap

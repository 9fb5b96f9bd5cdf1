#include <algorithm>
#include <utility>

#include "flashoverlap/plan_builders.h"
#include "plan/arithmetic.h"
#include "plan/builder.h"
#include "plan/heads.h"
#include "plan/slices.h"

namespace flashoverlap {
namespace {

using plan::HeadShares;
using plan::index;

constexpr std::string_view kOperation = "gemm-all-to-all-heads";

/// The product [rows of this rank, n], cut into columns by destination.
TileGrid head_grid(const HeadShares& problem) {
  std::vector<Problem> problems;
  for (std::int64_t rank = 0; rank < problem.own.world_size; ++rank) {
    problems.push_back({.rows = problem.own.m,
                        .col_begin = problem.columns[index(rank)],
                        .cols = problem.num_columns(rank)});
  }
  return TileGrid(std::move(problems), problem.own.k, problem.own.tile_m, problem.own.tile_n);
}

OverlapPlan start_head_plan(const PlanOptions& options, const HeadShares& problem, std::int64_t parts,
                            std::int64_t channels) {
  OverlapPlan plan = plan::start_plan(kOperation, problem.own, head_grid(problem));
  plan.agreement = plan::hash_heads(kOperation, options, problem, parts, channels);
  plan.output_rows = problem.rows.back();
  plan.output_cols = problem.num_columns(options.rank);
  plan.output_row_shift = problem.rows[index(options.rank)];
  plan.output_col_shift = -problem.columns[index(options.rank)];
  return plan;
}

/// Tile rows [first, end) of one destination's columns, in tile order.
struct Strip {
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::vector<std::int64_t> tiles;
};

Strip strip_of(const plan::RowStrip& cut, std::int64_t cols, std::int64_t first_tile,
               const PlanOptions& options) {
  const std::int64_t tile_cols = plan::ceil_div(cols, options.tile_n);
  Strip strip{.row_begin = cut.row_begin, .rows = cut.rows, .tiles = {}};
  const std::int64_t first = cut.first_tile_row;
  for (const std::int64_t t : swizzled_order(cut.end_tile_row - first, tile_cols, options.swizzle)) {
    strip.tiles.push_back(first_tile + first * tile_cols + t);
  }
  return strip;
}

/// What one source sends to one destination, cut into `count` strips of rows: each is consecutive in the
/// destination's output. Depends only on what both ranks know.
std::vector<Strip> strips_of(std::int64_t rows, std::int64_t cols, std::int64_t first_tile,
                             const PlanOptions& options, std::int64_t count) {
  std::vector<Strip> strips;
  for (const plan::RowStrip& cut : plan::cut_rows(cols == 0 ? 0 : rows, options.tile_m, count)) {
    strips.push_back(strip_of(cut, cols, first_tile, options));
  }
  return strips;
}

/// Where the tile's rows go in a dense block of `cols` columns at `offset` whose first row is `row_begin`.
std::vector<PlacementSegment> rows_in_block(const Tile& tile, std::int64_t row_begin, std::int64_t col_begin,
                                            std::int64_t cols, std::int64_t offset) {
  const std::int64_t at = offset + (tile.row_begin - row_begin) * cols + tile.col_begin - col_begin;
  if (tile.cols == cols) return {{0, tile.rows, at}};
  std::vector<PlacementSegment> segments;
  for (std::int64_t row = 0; row < tile.rows; ++row) segments.push_back({row, 1, at + row * cols});
  return segments;
}

class Builder {
 public:
  Builder(const HeadShares& problem, std::int64_t parts, OverlapPlan& plan)
      : problem_(problem), parts_(parts), plan_(plan), segments_(index(plan.grid.num_tiles())) {
    std::int64_t first = 0;
    for (std::int64_t rank = 0; rank < plan.world_size; ++rank) {
      first_tile_.push_back(first);
      first += problem.num_columns(rank) == 0
                   ? 0
                   : plan::ceil_div(problem.own.m, problem.own.tile_m) *
                         plan::ceil_div(problem.num_columns(rank), problem.own.tile_n);
    }
  }

  void tail_free(const plan::SendChannels& channels) {
    const std::int32_t ranks = plan_.world_size;
    plan_.messages_per_pair = plan::most_head_messages(problem_, parts_);
    for (std::int32_t step = 1; step < ranks; ++step) {
      const std::int32_t target = plan::rank_after(plan_.rank, step, ranks);
      for (const Strip& strip : strips(plan_.rank, target)) {
        const Trigger complete{TriggerKind::kGroup, std::ssize(plan_.groups)};
        const Region packed = pack(strip, target);
        add_group(strip);
        plan_.transfers.push_back(plan::send_to(target, channels.of(plan_.rank, step), complete, packed));
      }
    }
    for (const Strip& strip : strips(plan_.rank, plan_.rank)) add_group(strip);
    if (plan_.groups.empty()) plan_.groups.push_back({0, 0});
    for (std::int32_t step = 1; step < ranks; ++step) {
      const std::int32_t source = plan::rank_after(plan_.rank, -step, ranks);
      for (const Strip& strip : strips(source, plan_.rank)) {
        const std::int64_t row = problem_.rows[index(source)] + strip.row_begin;
        const Region region{BufferKind::kOutput, row * plan_.output_cols, strip.rows * plan_.output_cols};
        plan_.transfers.push_back(plan::receive_from(source, channels.of(source, step), region, -1));
      }
    }
    place();
  }

  /// The rows of each rank in `num_slices` pieces: what all ranks have of one goes by one all-to-all and lies
  /// together at its destination.
  void sliced(std::int64_t num_slices) {
    std::int64_t output_row = 0;
    for (std::int64_t piece = 0; piece < num_slices; ++piece)
      output_row += send_piece(piece, num_slices, output_row);
    place();
  }

 private:
  /// Returns how many rows of the output it fills, from `output_row` on.
  std::int64_t send_piece(std::int64_t piece, std::int64_t num_slices, std::int64_t output_row) {
    Transfer exchange;
    exchange.kind = TransferKind::kAllToAll;
    exchange.trigger = {TriggerKind::kGroup, piece};
    exchange.source = {BufferKind::kPacked, plan_.packed_size, 0};
    const std::int64_t first_position = std::ssize(plan_.schedule);
    std::int64_t rows = 0;
    for (std::int32_t rank = 0; rank < plan_.world_size; ++rank) {
      const std::int64_t begin = plan_.packed_size;
      const plan::RowStrip own = plan::piece_of_rows(problem_.own.m, problem_.own.tile_m, num_slices, piece);
      if (own.rows > 0 && problem_.num_columns(rank) > 0) {
        const Strip strip = strip_of(own, problem_.num_columns(rank), first_tile_[index(rank)], problem_.own);
        if (plan_.world_size > 1) pack(strip, rank);
        plan_.schedule.insert(plan_.schedule.end(), strip.tiles.begin(), strip.tiles.end());
      }
      const std::int64_t received =
          plan::piece_of_rows(problem_.num_rows(rank), problem_.own.tile_m, num_slices, piece).rows;
      exchange.send_counts.push_back(plan_.packed_size - begin);
      exchange.receive_counts.push_back(received * plan_.output_cols);
      rows += received;
    }
    exchange.source.count = plan_.packed_size - exchange.source.offset;
    exchange.destination = {BufferKind::kOutput, output_row * plan_.output_cols, rows * plan_.output_cols};
    plan_.groups.push_back({first_position, std::ssize(plan_.schedule) - first_position});
    if (plan_.world_size > 1) plan_.transfers.push_back(std::move(exchange));
    return rows;
  }

  [[nodiscard]] std::vector<Strip> strips(std::int32_t source, std::int32_t destination) const {
    return strips_of(problem_.num_rows(source), problem_.num_columns(destination),
                     first_tile_[index(destination)], problem_.own, parts_);
  }

  /// Row after row, as the destination has them.
  Region pack(const Strip& strip, std::int32_t target) {
    const std::int64_t cols = problem_.num_columns(target);
    const Region region{BufferKind::kPacked, plan_.packed_size, strip.rows * cols};
    for (const std::int64_t t : strip.tiles) {
      segments_[index(t)] = rows_in_block(plan_.grid.tile(t), strip.row_begin,
                                          problem_.columns[index(target)], cols, region.offset);
    }
    plan_.packed_size += region.count;
    return region;
  }

  void add_group(const Strip& strip) {
    plan_.groups.push_back({std::ssize(plan_.schedule), std::ssize(strip.tiles)});
    plan_.schedule.insert(plan_.schedule.end(), strip.tiles.begin(), strip.tiles.end());
  }

  void place() {
    plan::PlacementBuilder placement(plan_.grid.num_tiles());
    for (const std::vector<PlacementSegment>& of_tile : segments_) placement.add_tile(of_tile);
    plan_.placement = placement.take();
  }

  const HeadShares& problem_;
  std::int64_t parts_;
  OverlapPlan& plan_;
  std::vector<std::vector<PlacementSegment>> segments_;  // by tile
  std::vector<std::int64_t> first_tile_;                 // by destination
};

}  // namespace

OverlapPlan plan_gemm_all_to_all(const PlanOptions& options, const HeadSlices& slices) {
  const HeadShares problem = plan::share_heads(options, slices, options.n);
  const plan::SendChannels channels(slices.columns.send_channels, plan::kChannelsOfComputed,
                                    options.world_size);
  OverlapPlan plan = start_head_plan(options, problem, slices.columns.parts, channels.count());
  Builder(problem, slices.columns.parts, plan).tail_free(channels);
  return plan;
}

OverlapPlan plan_serial_gemm_all_to_all(const PlanOptions& options, const HeadSlices& slices) {
  return plan_sliced_gemm_all_to_all(options, slices, 1);
}

OverlapPlan plan_sliced_gemm_all_to_all(const PlanOptions& options, const HeadSlices& slices,
                                        std::int64_t num_slices) {
  plan::check_num_slices(num_slices);
  const HeadShares problem = plan::share_heads(options, slices, options.n);
  OverlapPlan plan = start_head_plan(options, problem, -num_slices, 1);
  Builder(problem, 1, plan).sliced(num_slices);
  return plan;
}

}  // namespace flashoverlap

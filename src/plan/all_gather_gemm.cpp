#include <algorithm>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/plan_builders.h"
#include "plan/arithmetic.h"
#include "plan/builder.h"
#include "plan/slices.h"

namespace flashoverlap {
namespace {

using plan::index;

constexpr std::string_view kRowsOperation = "all-gather-gemm";
constexpr std::string_view kColumnsOperation = "sharded-weight-gemm";

std::string_view operation_of(SliceAxis axis) {
  return axis == SliceAxis::kRows ? kRowsOperation : kColumnsOperation;
}

std::int64_t size_along(const PlanOptions& options, SliceAxis axis) {
  return axis == SliceAxis::kRows ? options.m : options.n;
}

BufferKind gathered_buffer(SliceAxis axis) {
  return axis == SliceAxis::kRows ? BufferKind::kInput : BufferKind::kWeight;
}

void sort_gates(OverlapPlan& plan) {
  std::ranges::stable_sort(plan.gates, {}, &Gate::tile);
}

/// Adds the tiles to the schedule, each held by the slice; -1: not held.
void schedule_tiles(OverlapPlan& plan, const std::vector<std::int64_t>& tiles, std::int64_t slice) {
  for (const std::int64_t tile : tiles) {
    plan.schedule.push_back(tile);
    if (slice >= 0) plan.gates.push_back({.tile = tile, .slice = slice, .point = GatePoint::kStart});
  }
}

void close_group(OverlapPlan& plan) {
  const std::int64_t begin =
      plan.groups.empty() ? 0 : plan.groups.back().first_position + plan.groups.back().num_tiles;
  plan.groups.push_back({begin, std::ssize(plan.schedule) - begin});
}

/// Pieces of each rank's slice, equally many for all, so that piece i of all ranks is one collective. They
/// end at tile boundaries; some may be empty.
struct Pieces {
  std::vector<std::int64_t> begins;            ///< Of the slices.
  std::vector<std::vector<std::int64_t>> cut;  ///< [rank][i]: where piece i begins; one more at the end.
  [[nodiscard]] std::int64_t size(std::size_t rank, std::size_t i) const {
    return cut[rank][i + 1] - cut[rank][i];
  }
};

Pieces cut_pieces(std::vector<std::int64_t> begins, std::int64_t tile, std::int64_t num_slices) {
  Pieces pieces{.begins = std::move(begins), .cut = {}};
  for (std::size_t rank = 0; rank + 1 < pieces.begins.size(); ++rank) {
    const std::int64_t size = pieces.begins[rank + 1] - pieces.begins[rank];
    const std::int64_t strips = plan::ceil_div(size, tile);
    auto& cut = pieces.cut.emplace_back();
    for (std::int64_t i = 0; i <= num_slices; ++i) {
      cut.push_back(pieces.begins[rank] + std::min(size, plan::share_begin(strips, num_slices, i) * tile));
    }
  }
  return pieces;
}

}  // namespace

OverlapPlan plan_all_gather_gemm(const PlanOptions& options, const SliceOptions& slices, SliceAxis axis) {
  plan::check_options(options);
  plan::check_no_partition(options);
  plan::check_parts(slices.parts);
  const std::vector<std::int64_t> begins =
      slice_begins(slices, size_along(options, axis), options.world_size);
  const plan::Slices cut(options, begins, axis);
  OverlapPlan plan = plan::start_plan(operation_of(axis), options, cut.grid());
  const plan::SendChannels channels(slices.send_channels, plan::kChannelsOfGiven, options.world_size);
  plan.agreement = plan::hash_slices(plan.operation, options, begins, axis, slices.parts, channels.count());
  const auto region = [&](const plan::Part& part) {
    return Region{gathered_buffer(axis), part.begin * options.k, part.size * options.k};
  };
  if (options.world_size > 1 && options.k > 0) {
    for (std::int32_t rank = 0; rank < options.world_size; ++rank)
      plan.messages_per_pair = std::max(plan.messages_per_pair, cut.num_parts(rank, slices.parts));
  }
  // The own slice in the parts in which it is sent, then the others in theirs.
  const std::vector<plan::Part> own = cut.parts(options.rank, slices.parts);
  for (const plan::Part& part : own) schedule_tiles(plan, part.tiles, -1);
  close_group(plan);
  for (std::int32_t step = 1; step < options.world_size; ++step) {
    const std::int32_t source = plan::rank_after(options.rank, -step, options.world_size);
    const std::int32_t target = plan::rank_after(options.rank, step, options.world_size);
    for (const plan::Part& part : own) {
      if (region(part).count == 0) continue;
      plan.transfers.push_back(plan::send_to(target, channels.of(options.rank, step), {}, region(part)));
    }
    for (const plan::Part& part : cut.parts(source, slices.parts)) {
      std::int64_t slice = -1;
      if (region(part).count > 0) {
        slice = std::ssize(plan.slices);
        plan.slices.push_back({source, region(part)});
        plan.transfers.push_back(plan::receive_from(source, channels.of(source, step), region(part), slice));
      }
      schedule_tiles(plan, part.tiles, slice);
    }
    close_group(plan);
  }
  sort_gates(plan);
  return plan;
}

OverlapPlan plan_sliced_all_gather_gemm(const PlanOptions& options, const SliceOptions& slices,
                                        std::int64_t num_slices, SliceAxis axis) {
  plan::check_options(options);
  plan::check_no_partition(options);
  plan::check_num_slices(num_slices);
  const bool by_rows = axis == SliceAxis::kRows;
  const Pieces pieces = cut_pieces(slice_begins(slices, size_along(options, axis), options.world_size),
                                   by_rows ? options.tile_m : options.tile_n, num_slices);
  std::vector<Problem> problems;
  std::vector<Transfer> transfers;
  std::vector<Slice> arriving;
  std::int64_t end = 0;
  for (std::size_t i = 0; i < index(num_slices); ++i) {
    Transfer gather;
    gather.kind = TransferKind::kAllGather;
    gather.slice = static_cast<std::int64_t>(i);
    gather.destination = {gathered_buffer(axis), end * options.k, 0};
    for (std::size_t rank = 0; rank < index(options.world_size); ++rank) {
      const std::int64_t size = pieces.size(rank, i);
      const std::int64_t count = size * options.k;
      if (std::cmp_equal(rank, options.rank)) gather.source = {gathered_buffer(axis), end * options.k, count};
      gather.receive_counts.push_back(count);
      gather.destination.count += count;
      problems.push_back(by_rows ? Problem{.row_begin = end, .rows = size, .cols = options.n}
                                 : Problem{.rows = options.m, .col_begin = end, .cols = size});
      end += size;
    }
    arriving.push_back({options.rank, gather.destination});
    transfers.push_back(std::move(gather));
  }
  OverlapPlan plan = plan::start_plan(
      operation_of(axis), options, TileGrid(std::move(problems), options.k, options.tile_m, options.tile_n));
  plan.agreement = plan::hash_slices(plan.operation, options, pieces.begins, axis, num_slices, 1);
  if (options.world_size > 1 && options.k > 0) {
    plan.slices = std::move(arriving);
    plan.transfers = std::move(transfers);
  }
  std::int64_t first_tile = 0;
  for (std::size_t p = 0; p < plan.grid.problems().size(); ++p) {
    const Problem& problem = plan.grid.problems()[p];
    const std::int64_t rows = problem.cols == 0 ? 0 : plan::ceil_div(problem.rows, options.tile_m);
    std::vector<std::int64_t> tiles =
        swizzled_order(rows, plan::ceil_div(problem.cols, options.tile_n), options.swizzle);
    for (std::int64_t& tile : tiles) tile += first_tile;
    first_tile += std::ssize(tiles);
    const auto piece = static_cast<std::int64_t>(p) / options.world_size;
    schedule_tiles(plan, tiles, plan.slices.empty() ? -1 : piece);
    if ((p + 1) % index(options.world_size) == 0) close_group(plan);
  }
  sort_gates(plan);
  return plan;
}

std::vector<std::int64_t> sliced_rows(const SliceOptions& slices, std::int64_t size, std::int32_t world_size,
                                      std::int64_t tile, std::int64_t num_slices) {
  plan::check_num_slices(num_slices);
  const Pieces pieces = cut_pieces(slice_begins(slices, size, world_size), tile, num_slices);
  std::vector<std::int64_t> rows;
  rows.reserve(index(size));
  for (std::size_t i = 0; i < index(num_slices); ++i) {
    for (std::size_t rank = 0; rank < index(world_size); ++rank) {
      for (std::int64_t row = pieces.cut[rank][i]; row < pieces.cut[rank][i + 1]; ++row) rows.push_back(row);
    }
  }
  return rows;
}

}  // namespace flashoverlap

// make_host_tables: from plan to flat tables, on the host alone.
#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "device_plan.h"
#include "flashoverlap/error.h"

namespace flashoverlap::cuda {
namespace {

constexpr std::int64_t kLargestSlab = 64;  // rows of a chunk
constexpr std::int64_t kSmallestSlab = 8;  // rows of a swizzle atom
constexpr std::int64_t kVector = 8;

void check_sizes(const OverlapPlan& plan) {
  constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
  if (plan.grid.rows() > kLimit || plan.grid.cols() > kLimit || plan.output_rows > kLimit ||
      plan.output_cols > kLimit || plan.grid.num_tiles() > kLimit) {
    throw Error(ErrorKind::kUnsupported, "CUDA: more than 2^31 - 1 rows, columns or tiles");
  }
  if (plan.grid.tile_m() > INT16_MAX || plan.grid.tile_n() > INT16_MAX) {
    throw Error(ErrorKind::kBadArgument, "CUDA: tile of " + std::to_string(plan.grid.tile_m()) + " x " +
                                             std::to_string(plan.grid.tile_n()) + "; at most 32767");
  }
}

// Rows of the slabs into which the copy engine can cut this tile; 0: it cannot.
std::int64_t slab_rows_of_tile(const OverlapPlan& plan, std::int64_t index) {
  const Tile& tile = plan.grid.tile(index);
  if (tile.cols != plan.grid.tile_n()) return 0;
  std::int64_t rows = kLargestSlab;
  for (const PlacementSegment& segment : plan.placement.of_tile(index)) {
    if (segment.offset % plan.grid.tile_n() != 0) return 0;
    rows = std::gcd(rows, std::gcd(segment.row_begin, segment.rows));
  }
  return rows >= kSmallestSlab ? rows : 0;
}

bool is_dense(const OverlapPlan& plan, std::int64_t index) {
  const auto segments = plan.placement.of_tile(index);
  return segments.size() == 1 && segments[0].row_begin == 0 && segments[0].rows == plan.grid.tile(index).rows;
}

// The largest slab that suits all tiles that can be cut into slabs.
std::int64_t common_slab_rows(const OverlapPlan& plan) {
  std::int64_t common = 0;
  for (std::int64_t index = 0; index < plan.grid.num_tiles(); ++index) {
    if (plan.placement.of_tile(index).empty() || is_dense(plan, index)) continue;
    if (const std::int64_t rows = slab_rows_of_tile(plan, index); rows > 0) common = std::gcd(common, rows);
  }
  return common;
}

void place_in_slabs(const OverlapPlan& plan, std::int64_t index, HostTables& tables, TileWork& work) {
  work.kind = StoreKind::kSlabs;
  work.payload = static_cast<std::int64_t>(tables.slab_rows_of.size());
  std::vector<std::int32_t> slabs(static_cast<std::size_t>(work.rows / tables.slab_rows), 0);
  for (const PlacementSegment& segment : plan.placement.of_tile(index)) {
    for (std::int64_t row = 0; row < segment.rows; row += tables.slab_rows) {
      slabs[static_cast<std::size_t>((segment.row_begin + row) / tables.slab_rows)] =
          static_cast<std::int32_t>(segment.offset / plan.grid.tile_n() + row);
    }
  }
  tables.slab_rows_of.insert(tables.slab_rows_of.end(), slabs.begin(), slabs.end());
}

void place_in_rows(const OverlapPlan& plan, std::int64_t index, HostTables& tables, TileWork& work) {
  work.kind = StoreKind::kRows;
  work.payload = static_cast<std::int64_t>(tables.row_offsets.size());
  std::vector<std::int64_t> rows(static_cast<std::size_t>(work.rows), -1);
  for (const PlacementSegment& segment : plan.placement.of_tile(index)) {
    for (std::int64_t row = 0; row < segment.rows; ++row) {
      rows[static_cast<std::size_t>(segment.row_begin + row)] = segment.offset + row * work.cols;
    }
  }
  tables.row_offsets.insert(tables.row_offsets.end(), rows.begin(), rows.end());
}

void place_tile(const OverlapPlan& plan, std::int64_t index, HostTables& tables, TileWork& work) {
  const auto segments = plan.placement.of_tile(index);
  if (segments.empty()) {
    work.kind = StoreKind::kInPlace;
    work.payload = plan.output_row_shift;
    work.col_begin += static_cast<std::int32_t>(plan.output_col_shift);
  } else if (is_dense(plan, index)) {
    const std::int64_t tile_n = plan.grid.tile_n();
    const bool is_whole = work.cols == tile_n && segments[0].offset % tile_n == 0;
    work.kind = is_whole ? StoreKind::kWhole : StoreKind::kDense;
    work.payload = is_whole ? segments[0].offset / tile_n : segments[0].offset;
  } else if (tables.slab_rows > 0 && slab_rows_of_tile(plan, index) > 0) {
    place_in_slabs(plan, index, tables, work);
  } else {
    place_in_rows(plan, index, tables, work);
  }
}

TileWork make_work(const OverlapPlan& plan, std::int64_t index) {
  const Tile& tile = plan.grid.tile(index);
  const std::int64_t weight = plan.grid.problems()[static_cast<std::size_t>(tile.problem)].weight;
  TileWork work;
  work.row_begin = static_cast<std::int32_t>(tile.row_begin);
  work.col_begin = static_cast<std::int32_t>(tile.col_begin);
  work.weight_row = static_cast<std::int32_t>(weight * plan.grid.cols() + tile.col_begin);
  work.rows = static_cast<std::int16_t>(tile.rows);
  work.cols = static_cast<std::int16_t>(tile.cols);
  return work;
}

void make_schedule(const OverlapPlan& plan, HostTables& tables) {
  tables.slab_rows = static_cast<std::int32_t>(common_slab_rows(plan));
  for (const std::int64_t index : plan.schedule) {
    TileWork work = make_work(plan, index);
    tables.plain_schedule.push_back(work);
    place_tile(plan, index, tables, work);
    tables.schedule.push_back(work);
  }
  for (std::size_t group = 0; group < plan.groups.size(); ++group) {
    const WaveGroup& range = plan.groups[group];
    tables.group_tiles.push_back(range.num_tiles);
    for (std::int64_t p = range.first_position; p < range.first_position + range.num_tiles; ++p) {
      tables.schedule[static_cast<std::size_t>(p)].group = static_cast<std::int32_t>(group);
    }
  }
}

void begin_tiles(std::vector<TileWork>& schedule, std::int64_t begun) {
  const std::vector<TileWork> first(schedule.begin(), schedule.begin() + begun);
  schedule.insert(schedule.begin(), first.begin(), first.end());
}

// Width of all pieces but the last, which may be narrower, where it is one and the same, else 0.
std::int32_t uniform_width(std::span<const RestorePiece> pieces) {
  for (const RestorePiece& piece : pieces) {
    const bool is_last = &piece == &pieces.back();
    if (is_last ? piece.cols > pieces[0].cols : piece.cols != pieces[0].cols) return 0;
  }
  return static_cast<std::int32_t>(pieces[0].cols);
}

void make_restore(const OverlapPlan& plan, HostTables& tables) {
  tables.rows.resize(plan.restore.bands.empty() ? 0 : static_cast<std::size_t>(plan.output_rows));
  tables.is_restore_aligned = true;
  bool is_first = true;
  for (const RestoreBand& band : plan.restore.bands) {
    const auto pieces = plan.restore.of_band(band);
    for (std::int64_t row = 0; row < band.rows; ++row) {
      tables.rows[static_cast<std::size_t>(band.row_begin + row)] = {
          .first_piece = static_cast<std::int32_t>(band.first_piece),
          .row_in_band = static_cast<std::int32_t>(row)};
    }
    const std::int32_t width = uniform_width(pieces);
    tables.piece_cols = is_first || width == tables.piece_cols ? width : 0;  // 0 stays 0: no width is 0
    is_first = false;
    for (const RestorePiece& piece : pieces) {
      tables.is_restore_aligned &=
          piece.offset % kVector == 0 && piece.col_begin % kVector == 0 && piece.cols % kVector == 0;
    }
  }
  for (const RestorePiece& piece : plan.restore.pieces) {
    tables.pieces.push_back({.offset = piece.offset,
                             .col_begin = static_cast<std::int32_t>(piece.col_begin),
                             .cols = static_cast<std::int32_t>(piece.cols)});
  }
}

}  // namespace

HostTables make_host_tables(const OverlapPlan& plan, std::int64_t begun) {
  check_sizes(plan);
  HostTables tables;
  make_schedule(plan, tables);
  begin_tiles(tables.schedule, begun);
  make_restore(plan, tables);
  return tables;
}

}  // namespace flashoverlap::cuda

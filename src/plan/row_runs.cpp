#include "plan/row_runs.h"

#include <map>

#include "core/fail.h"

namespace flashoverlap::plan {

RowRuns::RowRuns(const OverlapPlan& plan) : of_tile_(static_cast<std::size_t>(plan.grid.num_tiles())) {
  std::map<std::int64_t, std::int64_t> by_first_row;
  for (const std::int64_t t : plan.schedule) {
    const Tile& tile = plan.grid.tile(t);
    const auto [entry, is_new] = by_first_row.try_emplace(tile.row_begin, size());
    if (is_new) runs_.push_back({tile.row_begin, tile.rows});
    of_tile_[static_cast<std::size_t>(t)] = entry->second;
    if (at(entry->second).count != tile.rows) {
      core::fail(
          ErrorKind::kUnsupported,
          "make_rows: tiles from row {} on have {} and {} rows; expected all rows of tiles to be alike",
          tile.row_begin, at(entry->second).count, tile.rows);
    }
  }
  std::int64_t end = 0;
  for (const auto& [first, run] : by_first_row) {
    if (first < end) {
      core::fail(ErrorKind::kUnsupported,
                 "make_rows: some tiles read rows up to {}, others from {} on; expected none in common", end,
                 first);
    }
    end = first + at(run).count;
  }
}

}  // namespace flashoverlap::plan

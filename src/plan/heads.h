#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "flashoverlap/plan_builders.h"

/// What the builders of plans along heads (Ulysses) share.
namespace flashoverlap::plan {

/// How tokens and columns are spread over the ranks.
struct HeadShares {
  std::vector<std::int64_t> rows;     ///< Begins, by rank.
  std::vector<std::int64_t> columns;  ///< Begins, by rank.
  PlanOptions own;                    ///< With this rank's m.

  [[nodiscard]] std::int64_t num_rows(std::int64_t rank) const;
  [[nodiscard]] std::int64_t num_columns(std::int64_t rank) const;
};

/// `num_columns`: of all ranks' heads. Throws Error(kBadArgument) naming the option that does not hold.
HeadShares share_heads(const PlanOptions& options, const HeadSlices& slices, std::int64_t num_columns);

/// The hash of a call with these shares; see hash_options.
std::uint64_t hash_heads(std::string_view operation, const PlanOptions& options, const HeadShares& shares,
                         std::int64_t parts, std::int64_t channels);

/// Tile rows [first_tile_row, end_tile_row) of a block of rows.
struct RowStrip {
  std::int64_t first_tile_row = 0;
  std::int64_t end_tile_row = 0;
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
};

/// Piece `piece` of `rows` rows cut into `count` nearly equal pieces at tile boundaries. May be empty.
RowStrip piece_of_rows(std::int64_t rows, std::int64_t tile_m, std::int64_t count, std::int64_t piece);

/// `rows` rows cut into `count` nearly equal strips at tile boundaries, fewer where there are fewer tile
/// rows.
std::vector<RowStrip> cut_rows(std::int64_t rows, std::int64_t tile_m, std::int64_t count);

/// OverlapPlan::messages_per_pair where each rank's rows, in `parts` strips, meet each other rank's columns.
std::int64_t most_head_messages(const HeadShares& shares, std::int64_t parts);

}  // namespace flashoverlap::plan

#include "plan/heads.h"

#include <algorithm>
#include <span>

#include "plan/agreement.h"
#include "plan/arithmetic.h"
#include "plan/builder.h"
#include "plan/slices.h"

namespace flashoverlap::plan {
namespace {

std::int64_t num_strips(std::int64_t rows, std::int64_t tile_m, std::int64_t count) {
  return std::min(std::max<std::int64_t>(count, 1), ceil_div(rows, tile_m));
}

}  // namespace

std::int64_t HeadShares::num_rows(std::int64_t rank) const {
  return rows[index(rank + 1)] - rows[index(rank)];
}

std::int64_t HeadShares::num_columns(std::int64_t rank) const {
  return columns[index(rank + 1)] - columns[index(rank)];
}

HeadShares share_heads(const PlanOptions& options, const HeadSlices& slices, std::int64_t num_columns) {
  check_options(options);
  check_no_partition(options);
  check_parts(slices.columns.parts);
  HeadShares shares{.rows = slice_begins(slices.rows, options.m, options.world_size),
                    .columns = slice_begins(slices.columns, num_columns, options.world_size),
                    .own = options};
  shares.own.m = shares.num_rows(options.rank);
  return shares;
}

std::uint64_t hash_heads(std::string_view operation, const PlanOptions& options, const HeadShares& shares,
                         std::int64_t parts, std::int64_t channels) {
  AgreementHash hash = hash_options(operation, options, {});
  hash.add(std::span(shares.rows));
  hash.add(std::span(shares.columns));
  hash.add(parts);
  hash.add(channels);
  return hash.value();
}

RowStrip piece_of_rows(std::int64_t rows, std::int64_t tile_m, std::int64_t count, std::int64_t piece) {
  const std::int64_t tile_rows = ceil_div(rows, tile_m);
  RowStrip strip{.first_tile_row = share_begin(tile_rows, count, piece),
                 .end_tile_row = share_begin(tile_rows, count, piece + 1)};
  strip.row_begin = std::min(strip.first_tile_row * tile_m, rows);
  strip.rows = std::min(strip.end_tile_row * tile_m, rows) - strip.row_begin;
  return strip;
}

std::int64_t most_head_messages(const HeadShares& shares, std::int64_t parts) {
  std::int64_t most = 0;
  for (std::int64_t rank = 0; rank < shares.own.world_size; ++rank) {
    const bool has_all_columns = shares.num_columns(rank) == shares.columns.back();
    if (!has_all_columns) most = std::max(most, num_strips(shares.num_rows(rank), shares.own.tile_m, parts));
  }
  return most;
}

std::vector<RowStrip> cut_rows(std::int64_t rows, std::int64_t tile_m, std::int64_t count) {
  const std::int64_t num = num_strips(rows, tile_m, count);
  std::vector<RowStrip> strips;
  for (std::int64_t s = 0; s < num; ++s) strips.push_back(piece_of_rows(rows, tile_m, num, s));
  return strips;
}

}  // namespace flashoverlap::plan

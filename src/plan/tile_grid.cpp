#include <algorithm>
#include <optional>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/plan.h"
#include "plan/arithmetic.h"

namespace flashoverlap {
namespace {

using core::fail;

/// Tables with more entries than this are a slip in the tile size, not a plan: 2^28 tiles take 10 GiB.
constexpr std::int64_t kMaxTiles = std::int64_t{1} << 28U;

void check_size(const char* name, std::int64_t value) {
  if (value < 1) fail(ErrorKind::kBadArgument, "{} must be at least 1, got {}", name, value);
}

void check_problem(std::size_t i, const Problem& p) {
  const auto non_negative = [i](const char* name, std::int64_t value) {
    if (value < 0) fail(ErrorKind::kBadArgument, "problem {}: {} must be at least 0, got {}", i, name, value);
  };
  non_negative("row_begin", p.row_begin);
  non_negative("rows", p.rows);
  non_negative("col_begin", p.col_begin);
  non_negative("cols", p.cols);
  non_negative("weight", p.weight);
  const auto row_end = plan::sum(p.row_begin, p.rows);
  const auto col_end = plan::sum(p.col_begin, p.cols);
  if (!row_end || !col_end || !plan::product(*row_end, *col_end)) {
    fail(ErrorKind::kBadArgument, "problem {}: {} x {} at row {}, column {} does not fit in 64 bits", i,
         p.rows, p.cols, p.row_begin, p.col_begin);
  }
}

std::int64_t count_all(const std::vector<Problem>& problems, std::int64_t tile_m, std::int64_t tile_n) {
  std::int64_t total = 0;
  for (const Problem& p : problems) {
    const auto count = plan::product(plan::ceil_div(p.rows, tile_m), plan::ceil_div(p.cols, tile_n));
    const auto next = count ? plan::sum(total, *count) : std::nullopt;
    if (!next || *next > kMaxTiles) {
      fail(ErrorKind::kBadArgument, "tiles of {} x {} cut {} x {} into more than {}; use larger tiles",
           tile_m, tile_n, p.rows, p.cols, kMaxTiles);
    }
    total = *next;
  }
  return total;
}

}  // namespace

TileGrid::TileGrid(std::vector<Problem> problems, std::int64_t k, std::int64_t tile_m, std::int64_t tile_n)
    : problems_(std::move(problems)), k_(k), tile_m_(tile_m), tile_n_(tile_n) {
  check_size("tile_m", tile_m);
  check_size("tile_n", tile_n);
  if (k < 0) fail(ErrorKind::kBadArgument, "k must be at least 0, got {}", k);
  for (std::size_t i = 0; i < problems_.size(); ++i) check_problem(i, problems_[i]);

  tiles_.reserve(plan::index(count_all(problems_, tile_m, tile_n)));
  for (std::size_t i = 0; i < problems_.size(); ++i) {
    const Problem& p = problems_[i];
    if (p.cols == 0) continue;
    // Counting down what is left avoids row + tile_m, which may overflow.
    for (std::int64_t rows_left = p.rows; rows_left > 0; rows_left -= std::min(tile_m, rows_left)) {
      for (std::int64_t cols_left = p.cols; cols_left > 0; cols_left -= std::min(tile_n, cols_left)) {
        tiles_.push_back({.problem = static_cast<std::int64_t>(i),
                          .row_begin = p.row_begin + p.rows - rows_left,
                          .rows = std::min(tile_m, rows_left),
                          .col_begin = p.col_begin + p.cols - cols_left,
                          .cols = std::min(tile_n, cols_left)});
      }
    }
  }
}

std::int64_t TileGrid::rows() const {
  std::int64_t end = 0;
  for (const Problem& p : problems_) end = std::max(end, p.row_begin + p.rows);
  return end;
}

std::int64_t TileGrid::cols() const {
  std::int64_t end = 0;
  for (const Problem& p : problems_) end = std::max(end, p.col_begin + p.cols);
  return end;
}

}  // namespace flashoverlap

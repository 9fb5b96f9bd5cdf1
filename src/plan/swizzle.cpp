#include <algorithm>

#include "core/fail.h"
#include "flashoverlap/plan_builders.h"
#include "plan/arithmetic.h"

namespace flashoverlap {

std::vector<std::int64_t> swizzled_order(std::int64_t tile_rows, std::int64_t tile_cols,
                                         std::int64_t swizzle) {
  if (swizzle < 1) core::fail(ErrorKind::kBadArgument, "swizzle must be at least 1, got {}", swizzle);
  if (tile_rows < 0 || tile_cols < 0) {
    core::fail(ErrorKind::kBadArgument, "a grid of {} x {} tiles must not be negative", tile_rows, tile_cols);
  }
  std::vector<std::int64_t> order;
  const auto total = plan::product(tile_rows, tile_cols);
  if (!total)
    core::fail(ErrorKind::kBadArgument, "a grid of {} x {} tiles does not fit", tile_rows, tile_cols);
  order.reserve(plan::index(*total));
  for (std::int64_t left = tile_rows; left > 0; left -= std::min(swizzle, left)) {
    const std::int64_t first = tile_rows - left;
    const std::int64_t height = std::min(swizzle, left);
    for (std::int64_t col = 0; col < tile_cols; ++col) {
      for (std::int64_t row = first; row < first + height; ++row) order.push_back(row * tile_cols + col);
    }
  }
  return order;
}

}  // namespace flashoverlap

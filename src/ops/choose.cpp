#include "ops/choose.h"

#include <cstdint>

namespace flashoverlap::ops {
namespace {

struct Shape {
  std::int64_t rows, cols;
};

// bench/cpu/gemm_bench: against one OpenBLAS call on the whole matrix, tiles of 128x128 take 1.16 to 1.25 of
// the time, 256x128 1.06 to 1.09. 16-bit matrices are converted once per tile that reads them, so larger
// tiles convert less.
constexpr Shape kSmall{128, 128};
constexpr Shape kLarge{256, 128};
constexpr Shape kLarge16Bit{256, 256};

// Fewer waves, and the last one would be too big a part of the whole.
constexpr std::int64_t kFewWaves = 16;

std::int64_t tiles(std::int64_t size, std::int64_t tile) {
  return (size + tile - 1) / tile;
}

}  // namespace

void choose_tile(PlanOptions& options) {
  const Shape large = options.dtype == DType::kFloat32 ? kLarge : kLarge16Bit;
  const std::int64_t large_tiles = tiles(options.m, large.rows) * tiles(options.n, large.cols);
  const Shape tile = large_tiles >= kFewWaves * options.resources.compute_units ? large : kSmall;
  if (options.tile_m == 0) options.tile_m = tile.rows;
  if (options.tile_n == 0) options.tile_n = tile.cols;
  if (options.swizzle == 0) options.swizzle = 1;
}

std::vector<std::int64_t> open_partition(const PlanOptions& options, std::int64_t waves,
                                         std::int64_t min_group_bytes) {
  return default_partition(waves, options.m * options.n * size_of(options.dtype), min_group_bytes);
}

}  // namespace flashoverlap::ops

#include "ops/choose.h"

namespace flashoverlap::ops {
namespace {

// bench/cpu/gemm_bench: OpenBLAS loses 7 to 11 % in tiles of 128 to 512 against one call on the whole matrix,
// so the smallest tile that is not slower makes the finest groups.
constexpr std::int64_t kTile = 128;

// 16-bit matrices are converted once per tile that reads them, so larger tiles convert less; not so large
// that the last wave is a big part of the whole.
constexpr std::int64_t kLargeTile = 256;
constexpr std::int64_t kFewWaves = 16;

std::int64_t tiles(std::int64_t size, std::int64_t tile) {
  return (size + tile - 1) / tile;
}

}  // namespace

void choose_tile(PlanOptions& options) {
  const std::int64_t large_tiles = tiles(options.m, kLargeTile) * tiles(options.n, kLargeTile);
  const bool large =
      options.dtype != DType::kFloat32 && large_tiles >= kFewWaves * options.resources.compute_units;
  const std::int64_t tile = large ? kLargeTile : kTile;
  if (options.tile_m == 0) options.tile_m = tile;
  if (options.tile_n == 0) options.tile_n = tile;
  if (options.swizzle == 0) options.swizzle = 1;
}

std::vector<std::int64_t> choose_partition(const PlanOptions& /*options*/, TransferKind /*collective*/,
                                           std::int64_t waves, const Communicator& /*communicator*/) {
  return default_partition(waves);
}

}  // namespace flashoverlap::ops

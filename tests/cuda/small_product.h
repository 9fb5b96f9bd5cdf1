// The small product that the tests of gates and launches cut up.
#pragma once

#include <cstdint>

#include "flashoverlap/plan_builders.h"

namespace flashoverlap::test {

/// m x n x k in bf16, in tiles of 16 x 24 on 3 compute units, so that there are several waves.
inline PlanOptions small_product(std::int32_t world_size, std::int64_t m, std::int64_t n, std::int64_t k) {
  PlanOptions options;
  options.world_size = world_size;
  options.dtype = DType::kBFloat16;
  options.m = m;
  options.n = n;
  options.k = k;
  options.tile_m = 16;
  options.tile_n = 24;
  options.resources.compute_units = 3;
  return options;
}

}  // namespace flashoverlap::test

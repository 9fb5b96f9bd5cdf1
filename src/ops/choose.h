#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/communicator.h"
#include "flashoverlap/plan.h"
#include "flashoverlap/plan_builders.h"

/// The one place that decides what the caller of an operator leaves open. All ranks come to the same answer:
/// it depends only on what they agree on.
namespace flashoverlap::ops {

/// Replaces tile_m, tile_n and swizzle where they are 0.
void choose_tile(PlanOptions& options);

/// Waves per group for `waves` waves; sums to `waves`. Called with the tile in place.
std::vector<std::int64_t> choose_partition(const PlanOptions& options, TransferKind collective,
                                           std::int64_t waves, const Communicator& communicator);

}  // namespace flashoverlap::ops

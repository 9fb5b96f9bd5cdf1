#pragma once

#include "flashoverlap/plan_builders.h"

/// The tile where neither the caller nor a tuner says one. All ranks come to the same answer: it depends only
/// on what they agree on.
namespace flashoverlap::ops {

/// Replaces tile_m, tile_n and swizzle where they are 0.
void choose_tile(PlanOptions& options);

}  // namespace flashoverlap::ops

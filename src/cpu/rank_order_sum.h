#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "flashoverlap/dtype.h"

namespace flashoverlap::cpu {

/// own = lower[0] + lower[1] + … + own + higher[0] + …, each of `count` elements, taken from the left in
/// float32. `own` counts with the bits that it would have had it been stored as `dtype` and sent, so that the
/// sum is that of a collective.
void sum_in_rank_order(std::span<const std::byte* const> lower, std::span<const std::byte* const> higher,
                       DType dtype, float* own, std::int64_t count);

}  // namespace flashoverlap::cpu

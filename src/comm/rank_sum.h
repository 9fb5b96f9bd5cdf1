#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "flashoverlap/dtype.h"

namespace flashoverlap::comm {

/// to[i] = from[0][i] + from[1][i] + … for each of `to`, in float32 in this order, rounded to `dtype` once.
/// The order makes results bitwise repeatable and independent of how data is cut into calls. A range of `to`
/// may be one of `from`, but must not overlap one otherwise.
void sum_in_rank_order(std::span<const std::byte* const> from, std::span<std::byte* const> to, DType dtype,
                       std::int64_t count);

}  // namespace flashoverlap::comm

#pragma once

#include <cstdint>
#include <span>

#include "flashoverlap/predictor.h"

namespace flashoverlap::tune {

/// Throws Error(kBadArgument) with check's reason.
void require(const OverlapCost& cost);

/// Throws Error(kBadArgument) unless `partition` consists of positive numbers that sum to `waves`.
void require_partition(std::span<const std::int64_t> partition, std::int64_t waves);

}  // namespace flashoverlap::tune

#pragma once

#include <cstdint>

#include "flashoverlap/dtype.h"

/// Conversion between float32 and the 16-bit types, round to nearest even, vectorised at run time where the
/// CPU can.
namespace flashoverlap::core {

/// to[i] = from[i] as float32 for `count` elements of type `dtype`. The ranges must not overlap.
void to_float(const void* from, DType dtype, float* to, std::int64_t count);

/// The inverse; a NaN stays a NaN, values beyond the type's range become infinite.
void from_float(const float* from, DType dtype, void* to, std::int64_t count);

/// accumulator[i] += values[i].
void add_to_float(const void* values, DType dtype, float* accumulator, std::int64_t count);

}  // namespace flashoverlap::core

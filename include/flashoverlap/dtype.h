#pragma once

#include <cstdint>
#include <string_view>

namespace flashoverlap {

/// Element type of matrices and messages. Products and sums are always accumulated in float32.
enum class DType { kFloat32, kBFloat16, kFloat16 };

/// Bytes of one element: 4, 2, 2.
[[nodiscard]] std::int64_t size_of(DType dtype);

/// "f32", "bf16", "f16".
[[nodiscard]] std::string_view name_of(DType dtype);

/// The inverse of `name_of`. Throws Error(kBadArgument) that lists the accepted names.
[[nodiscard]] DType parse_dtype(std::string_view name);

}  // namespace flashoverlap

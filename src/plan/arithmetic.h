#pragma once

#include <cstdint>
#include <limits>
#include <optional>

/// Integer arithmetic on sizes that cannot overflow unseen.
namespace flashoverlap::plan {

/// ceil(a / b) for a >= 0, b >= 1.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return a / b + (a % b == 0 ? 0 : 1);
}

/// a * b, or nothing when it does not fit. a, b >= 0.
constexpr std::optional<std::int64_t> product(std::int64_t a, std::int64_t b) {
  if (a != 0 && b > std::numeric_limits<std::int64_t>::max() / a) return std::nullopt;
  return a * b;
}

/// a + b, or nothing when it does not fit. a, b >= 0.
constexpr std::optional<std::int64_t> sum(std::int64_t a, std::int64_t b) {
  if (b > std::numeric_limits<std::int64_t>::max() - a) return std::nullopt;
  return a + b;
}

/// floor(index * total / parts) without the product: where part `index` of `total` begins when it is cut into
/// `parts`. total >= 0, 0 <= index <= parts, parts < 2^31.
constexpr std::int64_t share_begin(std::int64_t total, std::int64_t parts, std::int64_t index) {
  return total / parts * index + total % parts * index / parts;
}

constexpr std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

}  // namespace flashoverlap::plan

#include "values.h"

#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <tuple>

#include "core/half.h"

namespace flashoverlap::layers {
namespace {

void round_to(DType dtype, Values& values) {
  std::vector<char> elements(values.size() * static_cast<std::size_t>(size_of(dtype)));
  core::from_float(values.data(), dtype, elements.data(), std::ssize(values));
  core::to_float(elements.data(), dtype, values.data(), std::ssize(values));
}

/// Uniform in [-scale, scale).
Values make_random(std::int64_t rows, std::int64_t cols, float scale, std::uint64_t seed,
                   std::uint64_t number) {
  std::mt19937_64 random(seed * 1000 + number);
  std::uniform_real_distribution<float> uniform(-1, 1);
  Values values(static_cast<std::size_t>(rows * cols));
  for (float& value : values) value = uniform(random) * scale;
  return values;
}

/// Values that are made once while anyone has them.
struct Slot {
  std::mutex mutex;
  std::weak_ptr<const Values> values;
};

SharedValues share_random(std::int64_t rows, std::int64_t cols, float scale, DType dtype, std::uint64_t seed,
                          std::uint64_t number) {
  using Key = std::tuple<std::int64_t, std::int64_t, float, DType, std::uint64_t, std::uint64_t>;
  static std::mutex mutex;
  static std::map<Key, Slot> slots;
  Slot& slot = [&]() -> Slot& {
    const std::lock_guard lock(mutex);
    return slots[{rows, cols, scale, dtype, seed, number}];
  }();
  const std::lock_guard lock(slot.mutex);  // of this matrix alone: ranks make different ones at a time
  if (SharedValues found = slot.values.lock()) return found;
  Values values = make_random(rows, cols, scale, seed, number);
  round_to(dtype, values);
  SharedValues made = std::make_shared<const Values>(std::move(values));
  slot.values = made;
  return made;
}

}  // namespace

SharedValues random_weight(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed,
                           std::uint64_t number) {
  const float scale = 1 / std::sqrt(static_cast<float>(std::max<std::int64_t>(1, cols)));
  return share_random(rows, cols, scale, dtype, seed, number);
}

SharedValues random_tokens(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed,
                           std::uint64_t number) {
  constexpr float kScale = 3;  // products with a weight, both uniform, then have a variance of one
  return share_random(rows, cols, kScale, dtype, seed, number);
}

Values missing_values(std::int64_t count) {
  return Values(static_cast<std::size_t>(count), std::numeric_limits<float>::quiet_NaN());
}

Values rows_of(const Values& matrix, std::int64_t cols, std::int64_t first, std::int64_t count) {
  return {row_of(matrix, cols, first), row_of(matrix, cols, first + count)};
}

Values columns_of(const Values& matrix, std::int64_t cols, std::int64_t first, std::int64_t count) {
  Values columns;
  if (cols == 0) return columns;
  const std::int64_t rows = std::ssize(matrix) / cols;
  columns.reserve(static_cast<std::size_t>(rows * count));
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* const begin = row_of(matrix, cols, row) + first;
    columns.insert(columns.end(), begin, begin + count);
  }
  return columns;
}

Values transposed(const Values& matrix, std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kBlock = 32;  // of columns: what is read once stays in the cache
  Values result(matrix.size());
  for (std::int64_t begin = 0; begin < cols; begin += kBlock) {
    const std::int64_t end = std::min(cols, begin + kBlock);
    for (std::int64_t i = 0; i < rows; ++i) {
      const float* const row = row_of(matrix, cols, i);
      for (std::int64_t j = begin; j < end; ++j) result[static_cast<std::size_t>(j * rows + i)] = row[j];
    }
  }
  return result;
}

double largest_share(DType dtype, std::int64_t terms, int roundings) {
  constexpr double kFloat32 = 0x1p-24;  // unit roundoff of each type
  constexpr double kBFloat16 = 0x1p-9;
  constexpr double kFloat16 = 0x1p-12;
  if (dtype == DType::kFloat32) return kFloat32 * static_cast<double>(terms);
  // Results are sums of many terms of either sign, and what is stored on the way changes each of them by at
  // most a roundoff of its own: the error of the sum is distributed as the sum itself, so much smaller, and
  // errors of several steps, which are independent, add up in squares. Three times that, since the largest
  // error is compared with the largest value: not of the same element, and parts may be larger than their
  // sum. What float32 adds is next to nothing.
  constexpr double kSpread = 3;
  return kSpread * (dtype == DType::kBFloat16 ? kBFloat16 : kFloat16) *
         std::sqrt(static_cast<double>(roundings));
}

}  // namespace flashoverlap::layers

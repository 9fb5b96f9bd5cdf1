#pragma once

#include <flashoverlap/operators.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "layer.h"

/// Small matrices of the layers.
namespace flashoverlap::layers {

/// [rows, cols], the same for the same seed and number; such that products stay of the order of one.
inline Values random_values(std::int64_t rows, std::int64_t cols, std::uint64_t seed, std::uint64_t number) {
  std::mt19937_64 random(seed * 1000 + number);
  std::uniform_real_distribution<float> uniform(-1, 1);
  const float scale = 1 / std::sqrt(static_cast<float>(std::max<std::int64_t>(1, cols)));
  Values values(static_cast<std::size_t>(rows * cols));
  for (float& value : values) value = uniform(random) * scale;
  return values;
}

inline Values missing_values(std::int64_t count) {
  return Values(static_cast<std::size_t>(count), std::numeric_limits<float>::quiet_NaN());
}

inline void make_missing(Values& values) {
  std::ranges::fill(values, std::numeric_limits<float>::quiet_NaN());
}

inline double at(const Values& matrix, std::int64_t cols, std::int64_t row, std::int64_t col) {
  return static_cast<double>(matrix[static_cast<std::size_t>(row * cols + col)]);
}

/// Row `a_row` of A times row `b_row` of B, both [.., k].
inline double dot(const Values& a, std::int64_t a_row, const Values& b, std::int64_t b_row, std::int64_t k) {
  double sum = 0;
  for (std::int64_t p = 0; p < k; ++p) sum += at(a, k, a_row, p) * at(b, k, b_row, p);
  return sum;
}

/// A [.., a_cols] · B [n, b_cols]^T into out [.., n], all dense.
inline Operands operands(const Values& a, std::int64_t a_cols, const Values& b, std::int64_t b_cols,
                         Values& out, std::int64_t n) {
  Operands result;
  result.a = a.data();
  result.lda = a_cols;
  result.b = b.data();
  result.ldb = b_cols;
  result.out = out.data();
  result.ldo = n;
  return result;
}

/// A sample of rows: at most about 20 of `rows`.
inline std::int64_t sample_step(std::int64_t rows) {
  constexpr std::int64_t kSample = 20;
  return std::max<std::int64_t>(1, rows / kSample);
}

/// The largest difference, as a share of the largest value.
class LargestError {
 public:
  void add(double actual, double expected) {
    const double difference = std::abs(actual - expected);
    if (!(difference <= difference_)) difference_ = difference;
    value_ = std::max(value_, std::abs(expected));
  }
  [[nodiscard]] double share() const { return value_ > 0 ? difference_ / value_ : difference_; }

 private:
  double difference_ = 0;
  double value_ = 0;
};

constexpr double kRounding = 0x1p-24;

}  // namespace flashoverlap::layers

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "place.h"

/// What the layers are made of and checked with.
namespace flashoverlap::layers {

using SharedValues = std::shared_ptr<const Values>;

/// A weight [rows, cols] of random values, rounded to `dtype`; its products with what is of the order of one
/// are so, too. The same for the same arguments: made once for all ranks of the process, and kept as long as
/// one of them has it.
SharedValues random_weight(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed,
                           std::uint64_t number);
/// The same for what a weight is multiplied with, [rows, cols]: of the order of one, so that activations and
/// softmaxes behind the weight are far from linear.
SharedValues random_tokens(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed,
                           std::uint64_t number);

Values missing_values(std::int64_t count);  ///< NaN

/// Rows [first, first + count) of a matrix with `cols` columns.
Values rows_of(const Values& matrix, std::int64_t cols, std::int64_t first, std::int64_t count);
/// The same of columns.
Values columns_of(const Values& matrix, std::int64_t cols, std::int64_t first, std::int64_t count);
Values transposed(const Values& matrix, std::int64_t rows, std::int64_t cols);

[[nodiscard]] inline const float* row_of(const Values& matrix, std::int64_t cols, std::int64_t row) {
  return matrix.data() + row * cols;
}

template <class A, class B>
double dot(const A* a, const B* b, std::int64_t count) {
  constexpr int kLanes = 8;  // sums that do not wait for each other
  double sums[kLanes] = {};
  std::int64_t p = 0;
  for (; p + kLanes <= count; p += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane)
      sums[lane] += static_cast<double>(a[p + lane]) * static_cast<double>(b[p + lane]);
  }
  double sum = 0;
  for (const double lane : sums) sum += lane;
  for (; p < count; ++p) sum += static_cast<double>(a[p]) * static_cast<double>(b[p]);
  return sum;
}

/// to[p] += factor * from[p]
inline void add_scaled(double factor, const float* from, std::int64_t count, double* to) {
  for (std::int64_t p = 0; p < count; ++p) to[p] += factor * static_cast<double>(from[p]);
}

/// A [.., a.cols()] · B [n, a.cols()]^T into out [.., n].
inline Operands operands(const Matrix& a, const Matrix& b, const Matrix& out) {
  Operands result;
  result.a = a.data();
  result.lda = a.cols();
  result.b = b.data();
  result.ldb = b.cols();
  result.out = out.data();
  result.ldo = out.cols();
  result.stream = out.place().stream();
  return result;
}

inline GemmOptions gemm_options(const Place& place, std::int64_t m, std::int64_t n, std::int64_t k) {
  GemmOptions options;
  options.m = m;
  options.n = n;
  options.k = k;
  options.dtype = place.dtype();
  return options;
}

/// Rows to check: about 20, or as many as a few seconds are enough for when one takes `products` products.
inline std::vector<std::int64_t> sample_rows(std::int64_t rows, std::int64_t products) {
  constexpr std::int64_t kMostRows = 20;
  constexpr std::int64_t kMostProducts = 1'000'000'000;
  const std::int64_t sample =
      std::clamp<std::int64_t>(kMostProducts / std::max<std::int64_t>(1, products), 2, kMostRows);
  std::vector<std::int64_t> sampled;
  for (std::int64_t row = 0; row < rows; row += std::max<std::int64_t>(1, rows / sample))
    sampled.push_back(row);
  return sampled;
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

/// What LargestError may be of results that are sums in float32 over chains of up to `terms` products, and of
/// which `roundings` steps are stored in `dtype`.
double largest_share(DType dtype, std::int64_t terms, int roundings);

/// Steps of a sum over ranks that are stored: each rank's part, and the sum; by NCCL, the sums on the way.
inline int roundings_of_sum(int ranks) {
  return 1 + std::max(1, ranks - 1);
}

}  // namespace flashoverlap::layers

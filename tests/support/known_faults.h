#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "support/matrix.h"

/// Integer data whose float32 sums are exact in any order, with check sums that were computed elsewhere.
/// Faults that users of such libraries met are tried on it, with the numbers that are right.
namespace flashoverlap::test {

/// A_r[i, k] in [-4, 4].
inline std::int64_t known_a(std::int64_t seed, std::int64_t i, std::int64_t k) {
  return (40503 * i + 30011 * k + 1009 * seed) % 65521 % 9 - 4;
}

/// B_r[k, n] in [-3, 3]. The library takes B transposed: element (n, k) of its B is known_b(r, k, n).
inline std::int64_t known_b(std::int64_t seed, std::int64_t k, std::int64_t n) {
  return (27644 * k + 14699 * n + 4177 * seed) % 65521 % 7 - 3;
}

inline Matrix known_matrix_a(std::int64_t seed, std::int64_t m, std::int64_t k,
                             DType dtype = DType::kFloat32) {
  Matrix a(m, k, dtype);
  a.fill([&](std::int64_t i, std::int64_t p) { return known_a(seed, i, p); });
  return a;
}

/// [n, k]
inline Matrix known_matrix_b(std::int64_t seed, std::int64_t n, std::int64_t k,
                             DType dtype = DType::kFloat32) {
  Matrix b(n, k, dtype);
  b.fill([&](std::int64_t j, std::int64_t p) { return known_b(seed, p, j); });
  return b;
}

/// What the cases give of a result. Any error in any element changes `sum` or, when rows or tiles have
/// changed places, `weighted`. In float64, so that an element that is not a number makes both so.
struct CheckSums {
  double sum = 0;
  double weighted = 0;
  bool operator==(const CheckSums&) const = default;
  CheckSums& operator+=(const CheckSums& other) {
    sum += other.sum;
    weighted += other.weighted;
    return *this;
  }
};

inline std::ostream& operator<<(std::ostream& out, const CheckSums& sums) {
  return out << "S=" << sums.sum << " W=" << sums.weighted;
}

/// Of a matrix whose rows are rows first_row, first_row + 1, … of the whole result.
inline CheckSums check_sums(const Matrix& matrix, std::int64_t first_row = 0) {
  CheckSums sums;
  for (std::int64_t i = 0; i < matrix.rows(); ++i) {
    for (std::int64_t j = 0; j < matrix.cols(); ++j) {
      const double value = matrix.at(i, j);
      sums.sum += value;
      sums.weighted += value * static_cast<double>(((i + first_row) % 13 + 1) * (j % 11 + 1));
    }
  }
  return sums;
}

/// Upper left, upper right, lower left, lower right.
inline std::vector<float> corners(const Matrix& matrix) {
  const std::int64_t last_row = matrix.rows() - 1;
  const std::int64_t last_col = matrix.cols() - 1;
  return {matrix.at(0, 0), matrix.at(0, last_col), matrix.at(last_row, 0), matrix.at(last_row, last_col)};
}

}  // namespace flashoverlap::test

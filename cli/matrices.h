#pragma once

#include <cstdint>
#include <vector>

#include "problem_options.h"

/// The matrices that `flashoverlap run` works on.
namespace flashoverlap::cli {

/// A dense row-major matrix of any element type.
class Matrix {
 public:
  Matrix() = default;
  /// All bits set, which is NaN in every type: what is not written shows.
  Matrix(std::int64_t rows, std::int64_t cols, DType dtype);

  [[nodiscard]] std::int64_t rows() const { return rows_; }
  [[nodiscard]] std::int64_t cols() const { return cols_; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] void* data() { return bytes_.data(); }
  [[nodiscard]] const void* data() const { return bytes_.data(); }
  /// Copies row `row` to `to` as float32. `to` has at least cols() elements.
  void read_row(std::int64_t row, float* to) const;
  void write_row(std::int64_t row, const float* from);
  /// Makes every element NaN again.
  void poison();
  bool operator==(const Matrix&) const = default;

 private:
  [[nodiscard]] std::int64_t row_bytes() const { return cols_ * size_of(dtype_); }

  std::int64_t rows_ = 0;
  std::int64_t cols_ = 0;
  DType dtype_ = DType::kFloat32;
  std::vector<unsigned char> bytes_;
};

/// Elements uniform in [-1, 1), rounded to `dtype`; the same for the same seed and stream everywhere.
Matrix random_matrix(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed,
                     std::uint64_t stream);

/// A and B of one rank.
struct Inputs {
  Matrix a;  ///< [m, k]
  Matrix b;  ///< [n, k]
};

Inputs make_inputs(const ProblemOptions& options, int rank);

}  // namespace flashoverlap::cli

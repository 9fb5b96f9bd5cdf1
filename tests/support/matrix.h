#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/half.h"
#include "flashoverlap/dtype.h"

namespace flashoverlap::test {

/// A row-major matrix of any element type between two guards, NaN everywhere until it is set. Rows are `ld`
/// elements apart; what lies between cols and ld is guarded too.
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t cols, DType dtype, std::int64_t ld = -1)
      : rows_(rows), cols_(cols), ld_(ld < 0 ? cols : ld), dtype_(dtype) {
    bytes_.resize(static_cast<std::size_t>(rows_ * ld_ * size_of(dtype_) + 2 * kGuardBytes));
    poison();
  }

  /// Fills matrix and guards with NaN: an element that is never written, or read before it is, shows.
  void poison() { std::memset(bytes_.data(), 0xFF, bytes_.size()); }

  [[nodiscard]] std::int64_t rows() const { return rows_; }
  [[nodiscard]] std::int64_t cols() const { return cols_; }
  [[nodiscard]] std::int64_t ld() const { return ld_; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] std::byte* data() { return bytes_.data() + kGuardBytes; }
  [[nodiscard]] const std::byte* data() const { return bytes_.data() + kGuardBytes; }

  [[nodiscard]] float at(std::int64_t row, std::int64_t col) const {
    float value = 0;
    core::to_float(element(row, col), dtype_, &value, 1);
    return value;
  }
  /// Rounds to the element type.
  void set(std::int64_t row, std::int64_t col, float value) {
    core::from_float(&value, dtype_, const_cast<std::byte*>(element(row, col)), 1);
  }
  template <typename Function>
  void fill(const Function& value_of_row_and_col) {
    for (std::int64_t i = 0; i < rows_; ++i) {
      for (std::int64_t j = 0; j < cols_; ++j) set(i, j, static_cast<float>(value_of_row_and_col(i, j)));
    }
  }

  /// Both guards and the padding of all rows are as `poison` left them.
  [[nodiscard]] bool guards_intact() const {
    std::vector<bool> inside(bytes_.size(), false);
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t begin = kGuardBytes + row * ld_ * size_of(dtype_);
      for (std::int64_t i = 0; i < cols_ * size_of(dtype_); ++i)
        inside[static_cast<std::size_t>(begin + i)] = true;
    }
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      if (!inside[i] && bytes_[i] != std::byte{0xFF}) return false;
    }
    return true;
  }

  /// Everything, guards included, is as `poison` left it.
  [[nodiscard]] bool untouched() const {
    for (const std::byte byte : bytes_) {
      if (byte != std::byte{0xFF}) return false;
    }
    return true;
  }

  /// Same bits in guards, padding and elements.
  bool operator==(const Matrix& other) const { return bytes_ == other.bytes_; }

 private:
  static constexpr std::int64_t kGuardBytes = 4096;

  [[nodiscard]] const std::byte* element(std::int64_t row, std::int64_t col) const {
    return data() + (row * ld_ + col) * size_of(dtype_);
  }

  std::int64_t rows_;
  std::int64_t cols_;
  std::int64_t ld_;
  DType dtype_;
  std::vector<std::byte> bytes_;
};

}  // namespace flashoverlap::test

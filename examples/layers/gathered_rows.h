#pragma once

#include <utility>

#include "values.h"

namespace flashoverlap::layers {

/// A matrix of which each rank has some rows and gathers the others while it multiplies: twice, since the
/// slicing baseline (Method::kSliced) has its rows in another order.
class GatheredRows {
 public:
  /// This rank has rows [first, first + count) of `whole`, [.., cols]. `order`: of sliced_rows; empty: no
  /// such baseline.
  GatheredRows(Place& place, SharedValues whole, std::int64_t cols, std::int64_t first, std::int64_t count,
               std::vector<std::int64_t> order)
      : whole_(std::move(whole)),
        first_(first),
        count_(count),
        order_(std::move(order)),
        plain_(place, std::ssize(*whole_) / cols, cols),
        sliced_(place, std::ssize(order_), cols) {
    poison();
  }

  /// Forgets the rows of the others.
  void poison() {
    const std::int64_t cols = plain_.cols();
    plain_.poison();
    plain_.write_rows(first_, rows_of(*whole_, cols, first_, count_));
    if (order_.empty()) return;
    Values rows = missing_values(std::ssize(*whole_));
    for (std::int64_t i = 0; i < std::ssize(order_); ++i) {
      const std::int64_t source = row(Method::kSliced, i);
      if (source < first_ || source >= first_ + count_) continue;
      std::copy_n(row_of(*whole_, cols, source), cols, rows.begin() + i * cols);
    }
    sliced_.write(rows);
  }

  /// What calls by this method read, and write.
  [[nodiscard]] const Matrix& of(Method method) const { return method == Method::kSliced ? sliced_ : plain_; }
  /// Row i of it is which one of the whole.
  [[nodiscard]] std::int64_t row(Method method, std::int64_t i) const {
    return method == Method::kSliced ? order_[static_cast<std::size_t>(i)] : i;
  }
  [[nodiscard]] const Values& whole() const { return *whole_; }
  [[nodiscard]] bool has_sliced() const { return !order_.empty(); }

 private:
  SharedValues whole_;
  std::int64_t first_;
  std::int64_t count_;
  std::vector<std::int64_t> order_;
  Matrix plain_;
  Matrix sliced_;
};

/// For GatheredRows, of equal slices; none for num_slices = 0.
inline std::vector<std::int64_t> order_in_slices(std::int64_t rows, int ranks, std::int64_t tile,
                                                 std::int64_t num_slices) {
  if (num_slices == 0) return {};
  return sliced_rows({}, rows, ranks, tile, num_slices);
}

}  // namespace flashoverlap::layers

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashoverlap/dtype.h"

namespace flashoverlap::python {

namespace nb = nanobind;

/// Somebody else's array in this process's memory: where it is and how it is laid out. Strides are in
/// elements and may be 0 or negative. What owns the memory is kept alive by the caller, or by `lender`.
struct Array {
  std::string name;  ///< Of the argument, for messages.
  std::byte* data = nullptr;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  DType dtype = DType::kFloat32;
  bool writable = false;
  int device = -1;             ///< A CUDA device; -1: host memory.
  nb::ndarray<nb::ro> lender;  ///< What came through DLPack is held until the view goes.

  [[nodiscard]] std::int64_t size() const;
  /// "a [64, 32] f32".
  [[nodiscard]] std::string description() const;
  /// Elements of a row lie side by side, rows do not overlap and go upwards: what the executors take.
  [[nodiscard]] bool has_dense_rows() const;
  /// No gaps at all.
  [[nodiscard]] bool is_dense() const;
  /// Elements from one row to the next, at least the row's length. Needs has_dense_rows().
  [[nodiscard]] std::int64_t row_stride() const;
  /// Whether any byte may belong to both, judged by their extents.
  [[nodiscard]] bool overlaps(const Array& other) const;
};

/// Throws Error(kBadArgument), with both places, unless `array`, where there is one, is on `device` (-1: in
/// host memory).
void require_device(const Array* array, int device);

/// An input as the executors take it: the array itself where its rows are dense, otherwise a packed copy.
/// On a GPU nothing is copied: Error(kBadArgument).
class RowMajorInput {
 public:
  /// A missing array is null.
  explicit RowMajorInput(const Array* array);
  [[nodiscard]] const void* data() const { return data_; }
  [[nodiscard]] std::int64_t row_stride() const { return row_stride_; }
  [[nodiscard]] bool is_copy() const { return copy_ != nullptr; }

 private:
  std::unique_ptr<std::byte[]> copy_;
  const void* data_ = nullptr;
  std::int64_t row_stride_ = 0;
};

}  // namespace flashoverlap::python

// Matrices of small integers, whose products and sums are exact in fp16 (up to 2048) and bf16 (up to 256) in
// any order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "device.h"
#include "flashoverlap/dtype.h"

namespace flashoverlap::gpu_test {

using Integers = std::vector<std::int16_t>;  ///< Row-major and dense.

/// known-faults.md, data D1: A_r[i,k] in [-4, 4] and B_r[k,n] in [-3, 3], the latter as [n, k].
Integers known_a(std::int64_t seed, std::int64_t m, std::int64_t k);
Integers known_b(std::int64_t seed, std::int64_t n, std::int64_t k);

/// A[m,k] · B[n,k]^T, exact.
std::vector<std::int32_t> multiply(const Integers& a, const Integers& b, std::int64_t m, std::int64_t n,
                                   std::int64_t k);

/// A matrix on the device that is current where it is made and used, with `ld` elements from row to row,
/// poisoned with NaN, and with guard bytes around it.
class DeviceMatrix {
 public:
  DeviceMatrix(std::int64_t rows, std::int64_t cols, std::int64_t ld, DType dtype);

  [[nodiscard]] void* data() const;
  [[nodiscard]] std::int64_t rows() const { return rows_; }
  [[nodiscard]] std::int64_t cols() const { return cols_; }
  [[nodiscard]] std::int64_t ld() const { return ld_; }
  void fill(const Integers& values);
  void fill(const std::vector<float>& values);
  void poison();
  /// All elements as float, row-major and dense. Throws when a guard byte or a gap between rows was written.
  [[nodiscard]] std::vector<float> read() const;

 private:
  [[nodiscard]] std::int64_t bytes() const;
  void write(const std::function<float(std::int64_t)>& at);

  std::int64_t rows_, cols_, ld_;
  DType dtype_;
  cuda::DeviceBuffer memory_;
};

/// S and W of known-faults.md.
struct CheckSums {
  double sum = 0;
  double weighted = 0;
};
CheckSums check_sums(const std::vector<float>& matrix, std::int64_t cols, std::int64_t first_row = 0);

}  // namespace flashoverlap::gpu_test

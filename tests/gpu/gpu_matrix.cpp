#include "gpu_matrix.h"

#include <algorithm>

#include "check.h"
#include "core/half.h"
#include "gpu_ranks.h"
#include "gpu_test.h"

namespace flashoverlap::gpu_test {
namespace {

constexpr std::int64_t kGuardBytes = 4096;
constexpr unsigned char kGuard = 0x7F;
constexpr unsigned char kPoison = 0xFF;  // NaN in all types

cudaStream_t copy_stream() {
  return cuda::memory_stream(cuda::current_device());
}

}  // namespace

Integers known_a(std::int64_t seed, std::int64_t m, std::int64_t k) {
  Integers a(static_cast<std::size_t>(m * k));
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t p = 0; p < k; ++p) {
      a[static_cast<std::size_t>(i * k + p)] =
          static_cast<std::int16_t>((40503 * i + 30011 * p + 1009 * seed) % 65521 % 9 - 4);
    }
  }
  return a;
}

Integers known_b(std::int64_t seed, std::int64_t n, std::int64_t k) {
  Integers b(static_cast<std::size_t>(n * k));
  for (std::int64_t j = 0; j < n; ++j) {
    for (std::int64_t p = 0; p < k; ++p) {
      b[static_cast<std::size_t>(j * k + p)] =
          static_cast<std::int16_t>((27644 * p + 14699 * j + 4177 * seed) % 65521 % 7 - 3);
    }
  }
  return b;
}

std::vector<std::int32_t> multiply(const Integers& a, const Integers& b, std::int64_t m, std::int64_t n,
                                   std::int64_t k) {
  std::vector<std::int32_t> d(static_cast<std::size_t>(m * n));
  for (std::int64_t i = 0; i < m; ++i) {
    const std::int16_t* const row = a.data() + i * k;
    for (std::int64_t j = 0; j < n; ++j) {
      const std::int16_t* const col = b.data() + j * k;
      std::int32_t sum = 0;
      for (std::int64_t p = 0; p < k; ++p) sum += static_cast<std::int32_t>(row[p]) * col[p];
      d[static_cast<std::size_t>(i * n + j)] = sum;
    }
  }
  return d;
}

DeviceMatrix::DeviceMatrix(std::int64_t rows, std::int64_t cols, std::int64_t ld, DType dtype)
    : rows_(rows),
      cols_(cols),
      ld_(ld),
      dtype_(dtype),
      memory_(cuda::current_device(), bytes() + 2 * kGuardBytes, "a test matrix", readable_memory()) {
  FLASHOVERLAP_CUDA_CHECK(
      cudaMemsetAsync(memory_.data(), kGuard, static_cast<std::size_t>(memory_.bytes()), copy_stream()));
  FLASHOVERLAP_CUDA_CHECK(cudaStreamSynchronize(copy_stream()));
  poison();
}

std::int64_t DeviceMatrix::bytes() const {
  return rows_ * ld_ * size_of(dtype_);
}

void* DeviceMatrix::data() const {
  return static_cast<char*>(memory_.data()) + kGuardBytes;
}

void DeviceMatrix::write(const std::function<float(std::int64_t)>& at) {
  std::vector<unsigned char> raw(static_cast<std::size_t>(bytes()), kPoison);
  std::vector<float> row(static_cast<std::size_t>(cols_));
  for (std::int64_t i = 0; i < rows_; ++i) {
    for (std::int64_t j = 0; j < cols_; ++j) row[static_cast<std::size_t>(j)] = at(i * cols_ + j);
    core::from_float(row.data(), dtype_, raw.data() + i * ld_ * size_of(dtype_), cols_);
  }
  cuda::upload(cuda::current_device(), data(), raw.data(), raw.size());
}

void DeviceMatrix::fill(const Integers& values) {
  write([&](std::int64_t i) { return static_cast<float>(values[static_cast<std::size_t>(i)]); });
}

void DeviceMatrix::fill(const std::vector<float>& values) {
  write([&](std::int64_t i) { return values[static_cast<std::size_t>(i)]; });
}

void DeviceMatrix::poison() {
  const std::vector<unsigned char> raw(static_cast<std::size_t>(bytes()), kPoison);
  cuda::upload(cuda::current_device(), data(), raw.data(), raw.size());
}

std::vector<float> DeviceMatrix::read() const {
  std::vector<unsigned char> raw(static_cast<std::size_t>(memory_.bytes()));
  FLASHOVERLAP_CUDA_CHECK(
      cudaMemcpyAsync(raw.data(), memory_.data(), raw.size(), cudaMemcpyDeviceToHost, copy_stream()));
  FLASHOVERLAP_CUDA_CHECK(cudaStreamSynchronize(copy_stream()));
  const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
  GPU_EXPECT(std::all_of(raw.begin(), raw.begin() + kGuardBytes, is_guard),
             "guard bytes before the matrix were written");
  GPU_EXPECT(std::all_of(raw.end() - kGuardBytes, raw.end(), is_guard),
             "guard bytes behind the matrix were written");
  const std::int64_t element = size_of(dtype_);
  std::vector<float> values(static_cast<std::size_t>(rows_ * cols_));
  for (std::int64_t i = 0; i < rows_; ++i) {
    const unsigned char* const row = raw.data() + kGuardBytes + i * ld_ * element;
    GPU_EXPECT(std::all_of(row + cols_ * element, row + ld_ * element,
                           [](unsigned char byte) { return byte == kPoison; }),
               "row " << i << ": the gap behind column " << cols_ - 1 << " was written");
    core::to_float(row, dtype_, values.data() + i * cols_, cols_);
  }
  return values;
}

CheckSums check_sums(const std::vector<float>& matrix, std::int64_t cols, std::int64_t first_row) {
  CheckSums sums;
  for (std::size_t at = 0; at < matrix.size(); ++at) {
    const auto i = static_cast<std::int64_t>(at) / cols + first_row;
    const std::int64_t j = static_cast<std::int64_t>(at) % cols;
    sums.sum += static_cast<double>(matrix[at]);
    sums.weighted += static_cast<double>(matrix[at]) * static_cast<double>((i % 13 + 1) * (j % 11 + 1));
  }
  return sums;
}

}  // namespace flashoverlap::gpu_test

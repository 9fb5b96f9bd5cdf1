#include "matrices.h"

#include <algorithm>

#include "core/half.h"

namespace flashoverlap::cli {
namespace {

constexpr unsigned char kPoison = 0xFF;

/// SplitMix64 (Steele, Lea, Flood 2014): the i-th number of a stream without making those before it.
std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

float uniform(std::uint64_t bits) {
  constexpr float kScale = 1.0F / (1 << 23);
  return static_cast<float>(static_cast<std::int32_t>(bits >> 40) - (1 << 23)) * kScale;
}

}  // namespace

Matrix::Matrix(std::int64_t rows, std::int64_t cols, DType dtype)
    : rows_(rows),
      cols_(cols),
      dtype_(dtype),
      bytes_(static_cast<std::size_t>(rows * cols * size_of(dtype)), kPoison) {}

void Matrix::read_row(std::int64_t row, float* to) const {
  core::to_float(bytes_.data() + row * row_bytes(), dtype_, to, cols_);
}

void Matrix::write_row(std::int64_t row, const float* from) {
  core::from_float(from, dtype_, bytes_.data() + row * row_bytes(), cols_);
}

void Matrix::poison() {
  std::fill(bytes_.begin(), bytes_.end(), kPoison);
}

Matrix random_matrix(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed,
                     std::uint64_t stream) {
  Matrix matrix(rows, cols, dtype);
  const std::uint64_t base = mix(mix(seed) + stream);
  std::vector<float> values(static_cast<std::size_t>(cols));
  std::uint64_t index = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (float& value : values) value = uniform(mix(base + index++));
    matrix.write_row(row, values.data());
  }
  return matrix;
}

Inputs make_inputs(const ProblemOptions& options, int rank) {
  const std::uint64_t stream = 2 * static_cast<std::uint64_t>(rank);
  return {random_matrix(options.m, options.k, options.dtype, options.seed, stream),
          random_matrix(options.n, options.k, options.dtype, options.seed, stream + 1)};
}

}  // namespace flashoverlap::cli

#include "cpu/epilogue.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>

#include "core/half.h"

namespace flashoverlap::cpu {
namespace {

const std::byte* row_of(const void* matrix, std::int64_t row, std::int64_t ld, DType dtype) {
  return static_cast<const std::byte*>(matrix) + row * ld * size_of(dtype);
}

std::vector<float> read_vector(const void* data, DType dtype, std::int64_t cols) {
  std::vector<float> values;
  if (data == nullptr) return values;
  values.resize(static_cast<std::size_t>(cols));
  core::to_float(data, dtype, values.data(), cols);
  return values;
}

/// In kLanes interleaved sums: a single one would have to wait for itself at every step. The order is fixed,
/// so that every run gives the same bits.
float sum_of_squares(const float* values, std::int64_t count) {
  constexpr std::int64_t kLanes = 16;
  std::array<float, kLanes> sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      sums[static_cast<std::size_t>(lane)] += values[i + lane] * values[i + lane];
    }
  }
  for (; i < count; ++i) sums[0] += values[i] * values[i];
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

}  // namespace

void activate(Activation activation, float* values, std::int64_t count) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      // Written so that a NaN stays one.
      for (std::int64_t i = 0; i < count; ++i) values[i] = values[i] < 0 ? 0 : values[i];
      return;
    case Activation::kGelu:
      for (std::int64_t i = 0; i < count; ++i) {
        values[i] = 0.5F * values[i] * (1 + std::erf(values[i] * (std::numbers::sqrt2_v<float> / 2)));
      }
      return;
    case Activation::kSilu:
      for (std::int64_t i = 0; i < count; ++i) values[i] = values[i] / (1 + std::exp(-values[i]));
      return;
  }
}

RowEpilogue::RowEpilogue(const Epilogue& epilogue, DType dtype, std::int64_t cols)
    : epilogue_(epilogue),
      dtype_(dtype),
      cols_(cols),
      identity_(epilogue.bias == nullptr && epilogue.activation == Activation::kNone &&
                epilogue.residual == nullptr && epilogue.residual_out == nullptr &&
                epilogue.rms_norm_weight == nullptr),
      bias_(read_vector(epilogue.bias, dtype, cols)),
      norm_weight_(read_vector(epilogue.rms_norm_weight, dtype, cols)) {}

void RowEpilogue::apply(std::int64_t row, float* values, void* out) const {
  if (epilogue_.bias != nullptr) core::add_to_float(bias_.data(), DType::kFloat32, values, cols_);
  activate(epilogue_.activation, values, cols_);
  add_residual(row, values);
  if (epilogue_.rms_norm_weight != nullptr) normalise(values);
  core::from_float(values, dtype_, out, cols_);
}

void RowEpilogue::add_residual(std::int64_t row, float* values) const {
  if (epilogue_.residual != nullptr) {
    core::add_to_float(row_of(epilogue_.residual, row, epilogue_.residual_ld, dtype_), dtype_, values, cols_);
  }
  if (epilogue_.residual_out != nullptr) {
    auto* to = const_cast<std::byte*>(row_of(epilogue_.residual_out, row, epilogue_.residual_out_ld, dtype_));
    core::from_float(values, dtype_, to, cols_);
  }
}

void RowEpilogue::normalise(float* values) const {
  const float mean = sum_of_squares(values, cols_) / static_cast<float>(cols_);
  const float scale = 1 / std::sqrt(mean + epilogue_.rms_norm_eps);
  const float* weight = norm_weight_.data();
  for (std::int64_t i = 0; i < cols_; ++i) values[i] = values[i] * scale * weight[i];
}

}  // namespace flashoverlap::cpu

namespace flashoverlap {

std::string_view name_of(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return "none";
    case Activation::kRelu:
      return "relu";
    case Activation::kGelu:
      return "gelu";
    case Activation::kSilu:
      return "silu";
  }
  return "unknown";
}

}  // namespace flashoverlap

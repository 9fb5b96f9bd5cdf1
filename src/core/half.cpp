#include "core/half.h"

#include <bit>
#include <cstring>

// F16C and AVX2 where the CPU has them, found at run time, so that one binary runs everywhere.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define FLASHOVERLAP_MULTIVERSION __attribute__((target_clones("arch=haswell", "default")))
#else
#define FLASHOVERLAP_MULTIVERSION
#endif

namespace flashoverlap::core {
namespace {

float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  // Rounding could carry a NaN's payload into infinity: keep it a quiet NaN instead.
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  return static_cast<std::uint16_t>(is_nan ? ((bits >> 16) | 0x40U) : rounded);
}

FLASHOVERLAP_MULTIVERSION void bf16_range_to_float(const std::uint16_t* from, float* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = bf16_to_float(from[i]);
}

FLASHOVERLAP_MULTIVERSION void float_range_to_bf16(const float* from, std::uint16_t* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = float_to_bf16(from[i]);
}

FLASHOVERLAP_MULTIVERSION void f16_range_to_float(const _Float16* from, float* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

FLASHOVERLAP_MULTIVERSION void float_range_to_f16(const float* from, _Float16* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<_Float16>(from[i]);
}

FLASHOVERLAP_MULTIVERSION void add_floats(const float* values, float* accumulator, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) accumulator[i] += values[i];
}

FLASHOVERLAP_MULTIVERSION void add_bf16(const std::uint16_t* values, float* accumulator, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) accumulator[i] += bf16_to_float(values[i]);
}

FLASHOVERLAP_MULTIVERSION void add_f16(const _Float16* values, float* accumulator, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) accumulator[i] += static_cast<float>(values[i]);
}

}  // namespace

void to_float(const void* from, DType dtype, float* to, std::int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      if (count > 0) std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
      return;
    case DType::kBFloat16:
      return bf16_range_to_float(static_cast<const std::uint16_t*>(from), to, count);
    case DType::kFloat16:
      return f16_range_to_float(static_cast<const _Float16*>(from), to, count);
  }
}

void from_float(const float* from, DType dtype, void* to, std::int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      if (count > 0) std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
      return;
    case DType::kBFloat16:
      return float_range_to_bf16(from, static_cast<std::uint16_t*>(to), count);
    case DType::kFloat16:
      return float_range_to_f16(from, static_cast<_Float16*>(to), count);
  }
}

void add_to_float(const void* values, DType dtype, float* accumulator, std::int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      return add_floats(static_cast<const float*>(values), accumulator, count);
    case DType::kBFloat16:
      return add_bf16(static_cast<const std::uint16_t*>(values), accumulator, count);
    case DType::kFloat16:
      return add_f16(static_cast<const _Float16*>(values), accumulator, count);
  }
}

}  // namespace flashoverlap::core

#include "core/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/seed.h"

namespace flashoverlap::core {
namespace {

// A 16-bit floating-point format, as its definition says.
struct Format {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;
  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  [[nodiscard]] int max_exponent() const { return (1 << exponent_bits) - 1; }
};

constexpr Format kBFloat16{DType::kBFloat16, 8, 7};
constexpr Format kFloat16{DType::kFloat16, 5, 10};

double value_of(const Format& format, std::uint16_t bits) {
  const int exponent = (bits >> format.mantissa_bits) & format.max_exponent();
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  if (exponent == format.max_exponent()) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const int hidden = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  return sign * std::ldexp(hidden + mantissa, std::max(exponent, 1) - format.bias() - format.mantissa_bits);
}

// Round to nearest even by searching the two neighbours: positive patterns are ordered as their values are.
std::uint16_t rounded(const Format& format, float value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000U : 0U);
  const double magnitude = std::fabs(static_cast<double>(value));
  const auto infinity = static_cast<std::uint16_t>(format.max_exponent() << format.mantissa_bits);
  std::uint16_t low = 0;
  std::uint16_t high = infinity;
  while (high - low > 1) {
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (value_of(format, middle) <= magnitude ? low : high) = middle;
  }
  if (std::isinf(magnitude)) return sign | infinity;
  // Infinity stands where the next number would be, were there one.
  const double below = value_of(format, low);
  const double above = high == infinity ? std::ldexp(1.0, format.bias() + 1) : value_of(format, high);
  const bool up =
      magnitude - below > above - magnitude || (magnitude - below == above - magnitude && low % 2 == 1);
  return sign | (up ? high : low);
}

std::vector<std::uint16_t> all_patterns() {
  std::vector<std::uint16_t> patterns(65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
  return patterns;
}

class HalfTest : public test::SeededTest, public ::testing::WithParamInterface<Format> {};

TEST_P(HalfTest, EveryPatternHasItsValue) {
  const auto patterns = all_patterns();
  std::vector<float> values(patterns.size());
  to_float(patterns.data(), GetParam().dtype, values.data(), 65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    const double expected = value_of(GetParam(), patterns[i]);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(values[i])) << i;
    } else {
      ASSERT_EQ(static_cast<double>(values[i]), expected) << i;
      ASSERT_EQ(std::signbit(values[i]), (i & 0x8000U) != 0) << i;
    }
  }
}

TEST_P(HalfTest, EveryPatternComesBack) {
  const auto patterns = all_patterns();
  std::vector<float> values(patterns.size());
  std::vector<std::uint16_t> back(patterns.size());
  to_float(patterns.data(), GetParam().dtype, values.data(), 65536);
  from_float(values.data(), GetParam().dtype, back.data(), 65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(value_of(GetParam(), back[i]))) << i;
    } else {
      ASSERT_EQ(back[i], patterns[i]) << i;
    }
  }
}

// Around every pattern: the midpoint to the next one, and the floats on both sides of it.
TEST_P(HalfTest, RoundsToNearestEvenAroundEveryMidpoint) {
  const Format format = GetParam();
  std::vector<float> values;
  for (std::uint32_t bits = 0;
       bits < static_cast<std::uint32_t>(format.max_exponent()) << format.mantissa_bits; ++bits) {
    const double low = value_of(format, static_cast<std::uint16_t>(bits));
    const double next = value_of(format, static_cast<std::uint16_t>(bits + 1));
    const double high = std::isinf(next) ? std::ldexp(1.0, format.bias() + 1) : next;
    const auto middle = static_cast<float>(low / 2 + high / 2);
    for (const float value : {middle, std::nextafterf(middle, 0.0F), std::nextafterf(middle, INFINITY)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  std::vector<std::uint16_t> result(values.size());
  from_float(values.data(), format.dtype, result.data(), static_cast<std::int64_t>(values.size()));
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(result[i], rounded(format, values[i])) << values[i];
}

TEST_P(HalfTest, RoundsRandomFloats) {
  std::vector<float> values;
  while (values.size() < 100'003) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(rng_()));
    if (!std::isnan(value)) values.push_back(value);
  }
  std::vector<std::uint16_t> result(values.size());
  from_float(values.data(), GetParam().dtype, result.data(), static_cast<std::int64_t>(values.size()));
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(result[i], rounded(GetParam(), values[i])) << values[i];
}

TEST_P(HalfTest, EveryKindOfNaNStaysOne) {
  for (const std::uint32_t bits :
       {0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU, 0xFF800001U, 0xFFFFFFFFU, 0x7F80FFFFU}) {
    const auto value = std::bit_cast<float>(bits);
    std::uint16_t result = 0;
    from_float(&value, GetParam().dtype, &result, 1);
    EXPECT_TRUE(std::isnan(value_of(GetParam(), result))) << bits;
  }
}

// Every length up to past the widest vector, and what lies behind it stays.
TEST_P(HalfTest, AnyLengthAndNothingBeyondIt) {
  for (std::int64_t count = 0; count <= 70; ++count) {
    const auto size = static_cast<std::size_t>(count);
    std::vector<float> values(size + 1, -7.0F);
    for (std::size_t i = 0; i < size; ++i) values[i] = static_cast<float>(i) - 20.0F;
    std::vector<std::uint16_t> narrow(size + 1, 0xABCD);
    from_float(values.data(), GetParam().dtype, narrow.data(), count);
    EXPECT_EQ(narrow[size], 0xABCD);
    std::vector<float> sums(size + 1, 1.0F);
    add_to_float(narrow.data(), GetParam().dtype, sums.data(), count);
    std::vector<float> wide(size + 1, -9.0F);
    to_float(narrow.data(), GetParam().dtype, wide.data(), count);
    for (std::size_t i = 0; i < size; ++i) {
      ASSERT_EQ(wide[i], values[i]);
      ASSERT_EQ(sums[i], values[i] + 1.0F);
    }
    EXPECT_EQ(sums[size], 1.0F);
    EXPECT_EQ(wide[size], -9.0F);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, HalfTest, ::testing::Values(kBFloat16, kFloat16));

TEST(Float32Test, IsCopiedAndAdded) {
  const std::vector<float> values{1.5F, -0.0F, INFINITY, 3e-45F};
  std::vector<float> copy(4);
  to_float(values.data(), DType::kFloat32, copy.data(), 4);
  EXPECT_EQ(copy, values);
  EXPECT_TRUE(std::signbit(copy[1]));
  add_to_float(values.data(), DType::kFloat32, copy.data(), 2);
  EXPECT_EQ(copy[0], 3.0F);
  EXPECT_EQ(copy[3], 3e-45F);
  from_float(copy.data(), DType::kFloat32, copy.data() + 2, 0);
  EXPECT_EQ(copy[2], INFINITY);
}

}  // namespace
}  // namespace flashoverlap::core

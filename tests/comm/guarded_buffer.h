#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "core/half.h"
#include "flashoverlap/dtype.h"

namespace flashoverlap::test {

/// `count` elements between guard words. Everything starts as 0xFF bytes: NaN in every type, so that an
/// element that was not written, or was read too early, shows.
class GuardedBuffer {
 public:
  GuardedBuffer(std::int64_t count, DType dtype)
      : count_(count),
        dtype_(dtype),
        bytes_(static_cast<std::size_t>(count * size_of(dtype)) + 2 * kGuardBytes, kPoison) {}

  [[nodiscard]] void* data() { return bytes_.data() + kGuardBytes; }
  [[nodiscard]] void* at(std::int64_t element) { return bytes_.data() + offset_of(element); }
  [[nodiscard]] std::int64_t count() const { return count_; }

  void poison() { std::memset(data(), 0xFF, bytes_.size() - 2 * kGuardBytes); }

  void set(std::int64_t element, std::int64_t value) {
    const auto number = static_cast<float>(value);
    core::from_float(&number, dtype_, at(element), 1);
  }

  [[nodiscard]] float get(std::int64_t element) const {
    float value = 0;
    core::to_float(bytes_.data() + offset_of(element), dtype_, &value, 1);
    return value;
  }

  void fill(const std::function<std::int64_t(std::int64_t)>& value_of) {
    for (std::int64_t i = 0; i < count_; ++i) set(i, value_of(i));
  }

  /// Every element, without tolerance, and the guards. Stops at the first difference.
  void expect(const std::function<std::int64_t(std::int64_t)>& value_of) const {
    for (std::int64_t i = 0; i < count_; ++i) {
      if (get(i) == static_cast<float>(value_of(i))) continue;
      ADD_FAILURE() << "element " << i << " of " << count_ << " is " << get(i) << ", expected "
                    << value_of(i);
      break;
    }
    expect_guards();
  }

  void expect_guards() const {
    for (std::size_t i = 0; i < kGuardBytes; ++i) {
      ASSERT_EQ(bytes_[i], kPoison) << "guard byte " << i << " before the buffer";
      ASSERT_EQ(bytes_[bytes_.size() - 1 - i], kPoison) << "guard byte after the buffer";
    }
  }

 private:
  static constexpr std::size_t kGuardBytes = 64;
  static constexpr std::byte kPoison{0xFF};

  [[nodiscard]] std::size_t offset_of(std::int64_t element) const {
    return kGuardBytes + static_cast<std::size_t>(element * size_of(dtype_));
  }

  std::int64_t count_;
  DType dtype_;
  std::vector<std::byte> bytes_;
};

}  // namespace flashoverlap::test

#include "cpu/rank_order_sum.h"

#include <algorithm>
#include <array>

#include "core/half.h"

namespace flashoverlap::cpu {
namespace {

// Both blocks stay in the first-level cache.
constexpr std::int64_t kBlock = 1024;

}  // namespace

void sum_in_rank_order(std::span<const std::byte* const> lower, std::span<const std::byte* const> higher,
                       DType dtype, float* own, std::int64_t count) {
  const std::int64_t element = size_of(dtype);
  std::array<float, kBlock> sum;
  std::array<std::byte, kBlock * sizeof(float)> stored;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t size = std::min(kBlock, count - begin);
    float* part = own + begin;
    if (dtype != DType::kFloat32) {
      core::from_float(part, dtype, stored.data(), size);
      core::to_float(stored.data(), dtype, part, size);
    }
    if (!lower.empty()) {
      core::to_float(lower.front() + begin * element, dtype, sum.data(), size);
      for (const std::byte* addend : lower.subspan(1)) {
        core::add_to_float(addend + begin * element, dtype, sum.data(), size);
      }
      core::add_to_float(part, DType::kFloat32, sum.data(), size);
      std::copy_n(sum.data(), size, part);
    }
    for (const std::byte* addend : higher) core::add_to_float(addend + begin * element, dtype, part, size);
  }
}

}  // namespace flashoverlap::cpu

#include "comm/rank_sum.h"

#include <algorithm>
#include <array>

#include "core/half.h"

namespace flashoverlap::comm {
namespace {

// The running sum and one operand of a block stay in the first-level cache.
constexpr std::int64_t kBlockElements = 1024;

}  // namespace

void sum_in_rank_order(std::span<const std::byte* const> from, std::span<std::byte* const> to, DType dtype,
                       std::int64_t count) {
  std::array<float, kBlockElements> total;
  for (std::int64_t done = 0; done < count; done += kBlockElements) {
    const std::int64_t block = std::min(kBlockElements, count - done);
    const std::int64_t offset = done * size_of(dtype);
    core::to_float(from[0] + offset, dtype, total.data(), block);
    for (const std::byte* operand : from.subspan(1)) {
      core::add_to_float(operand + offset, dtype, total.data(), block);
    }
    // In place, this overwrites only what this block has read already.
    for (std::byte* result : to) core::from_float(total.data(), dtype, result + offset, block);
  }
}

}  // namespace flashoverlap::comm

#include "slab.h"

#include <algorithm>
#include <iterator>

namespace flashoverlap::cuda {

Slab::Slab(std::int64_t bytes) : bytes_(bytes / kAlignment * kAlignment) {
  if (bytes_ > 0) free_[0] = bytes_;
}

std::int64_t Slab::longest_free() const {
  std::int64_t longest = 0;
  for (const auto& [offset, bytes] : free_) longest = std::max(longest, bytes);
  return longest;
}

std::optional<std::int64_t> Slab::take(std::int64_t bytes) {
  const std::int64_t needed = std::max<std::int64_t>(1, (bytes + kAlignment - 1) / kAlignment) * kAlignment;
  const auto found = std::ranges::find_if(free_, [&](const auto& part) { return part.second >= needed; });
  if (found == free_.end()) return std::nullopt;
  const auto [offset, length] = *found;
  free_.erase(found);
  if (length > needed) free_[offset + needed] = length - needed;
  taken_[offset] = needed;
  return offset;
}

void Slab::give_back(std::int64_t offset) {
  const auto taken = taken_.find(offset);
  auto part = free_.emplace(offset, taken->second).first;
  taken_.erase(taken);
  if (const auto next = std::next(part); next != free_.end() && offset + part->second == next->first) {
    part->second += next->second;
    free_.erase(next);
  }
  if (part == free_.begin()) return;
  if (const auto before = std::prev(part); before->first + before->second == offset) {
    before->second += part->second;
    free_.erase(part);
  }
}

}  // namespace flashoverlap::cuda

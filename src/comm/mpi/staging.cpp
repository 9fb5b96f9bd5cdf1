#include "comm/mpi/staging.h"

#include <algorithm>
#include <utility>

namespace flashoverlap::comm::mpi {

StagingPool::Block::Block(StagingPool& pool, std::size_t bytes) : pool_(&pool), bytes_(bytes) {
  if (bytes == 0) return;
  Free largest{};
  {
    const std::lock_guard lock(pool.mutex_);
    const auto found = std::max_element(pool.free_.begin(), pool.free_.end(),
                                        [](const Free& a, const Free& b) { return a.bytes < b.bytes; });
    if (found != pool.free_.end()) {
      largest = std::move(*found);
      pool.free_.erase(found);
    }
  }
  if (largest.memory && largest.bytes >= bytes) {
    memory_ = std::move(largest.memory);
    bytes_ = largest.bytes;
  } else {
    largest.memory.reset();
    memory_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  }
}

StagingPool::Block::~Block() {
  if (!memory_) return;
  try {
    const std::lock_guard lock(pool_->mutex_);
    pool_->free_.push_back({std::move(memory_), bytes_});
  } catch (...) {
    // No memory for the list: the block is freed.
  }
}

}  // namespace flashoverlap::comm::mpi

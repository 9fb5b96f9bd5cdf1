#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace flashoverlap::comm::mpi {

/// Memory for what has to be added up, kept from call to call: new pages would cost more than the sum.
class StagingPool {
 public:
  /// At least `bytes` bytes, given back to the pool on destruction. The pool must live longer.
  class Block {
   public:
    Block() = default;
    Block(StagingPool& pool, std::size_t bytes);
    ~Block();
    Block(Block&& other) noexcept = default;
    Block& operator=(Block&&) = delete;

    [[nodiscard]] std::byte* data() const { return memory_.get(); }
    /// MPI may still write into it: never to be used again, nor freed.
    void abandon() { static_cast<void>(memory_.release()); }

   private:
    StagingPool* pool_ = nullptr;
    std::unique_ptr<std::byte[]> memory_;
    std::size_t bytes_ = 0;
  };

 private:
  struct Free {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes;
  };
  std::mutex mutex_;
  std::vector<Free> free_;  // At most one for each call that was in flight at the same time.
};

}  // namespace flashoverlap::comm::mpi

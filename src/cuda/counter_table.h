// Device memory for counting tables.
#pragma once

#include <cstdint>
#include <utility>

namespace flashoverlap::cuda {

/// `count` counters of 32 bits on one device, 0 at first. They come from pages that cudaMalloc made and that
/// stay until the process ends: stream memory operations refuse memory of a stream-ordered pool ("invalid
/// argument", driver 580), and cudaFree would wait for kernels that may wait for this rank. Thread-safe.
/// Whoever destroys a table makes sure that the device is done with it; the counters are cleared when they
/// are handed out again.
class CounterTable {
 public:
  CounterTable() = default;
  /// Throws Error(kOutOfMemory), Error(kDevice).
  CounterTable(int device, std::int64_t count);
  ~CounterTable();
  CounterTable(CounterTable&& other) noexcept { *this = std::move(other); }
  CounterTable& operator=(CounterTable&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }

  [[nodiscard]] std::uint32_t* data() const { return data_; }
  [[nodiscard]] std::int64_t size() const { return count_; }

 private:
  int device_ = 0;
  std::uint32_t* data_ = nullptr;
  std::int64_t count_ = 0;
};

}  // namespace flashoverlap::cuda

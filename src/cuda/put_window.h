// Where the other ranks put results, and where this rank finds theirs.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "device.h"
#include "put_consumer.h"
#include "put_heap.h"

namespace flashoverlap::cuda {

/// The puts of one plan on the device.
class DevicePuts {
 public:
  /// Copies synchronously.
  DevicePuts(int device, PutTable table);

  [[nodiscard]] const PutTable& table() const { return table_; }
  [[nodiscard]] const PutWork* puts() const { return static_cast<const PutWork*>(puts_.data()); }
  [[nodiscard]] std::uint32_t* done() const { return static_cast<std::uint32_t*>(done_.data()); }

 private:
  PutTable table_;
  DeviceBuffer puts_, done_;
};

/// Receive buffers and counting words of one executor, which its plans share, and the addresses of the other
/// ranks'. Two receive buffers take turns from call to call, and no call waits for the others to have read
/// what it overwrites: a rank puts into a buffer again two calls later, and by then has heard from every rank
/// in the call in between (PutTable), into whose memory a rank puts only behind its own call before.
///
/// The words only count up, by one for each put that is there, so nobody sets them back.
class PutWindow {
 public:
  /// Collective, on the host: whether ranks share a device.
  PutWindow(int device, Communicator& communicator, PutHeap& heap);

  static constexpr std::int64_t kBuffers = 2;

  [[nodiscard]] std::int64_t bytes() const {
    return buffers_[0] == nullptr ? 0 : kBuffers * (kWordsBytes + bytes_);
  }
  /// Whether any two ranks are on one device.
  [[nodiscard]] bool shares_device() const { return shares_device_; }
  /// Ranks on this rank's device.
  [[nodiscard]] int ranks_here() const { return ranks_here_; }

  /// Collective, on the host: receive buffers of at least so many bytes on this rank, and the addresses of
  /// all. What is too small is replaced, for which the call waits for those before it. Throws
  /// Error(kOutOfMemory), Error(kTimeout), and what the ranks' meeting throws.
  void open(std::int64_t bytes, const TransferLabel& label);

  /// The receive buffer of the call that is being enqueued.
  [[nodiscard]] void* received() const;

  /// Adds where puts of this call go.
  void fill(ConsumerParams& params) const;
  /// Adds what this call waits for.
  void fill(WaitForPutsParams& params, const PutTable& table) const;
  /// Behind everything of the call in `stream`: the next one takes the other buffer.
  void end_call(const PutTable& table, bool poisons, cudaStream_t stream);

 private:
  /// Words are this far apart, so that each is in a sector of its own.
  static constexpr std::int32_t kStride = 32;
  static constexpr std::int64_t kWordsBytes = kMaxPeerRanks * kStride * sizeof(std::uint32_t);

  struct Addresses {
    std::array<char*, kBuffers> received{};
    std::uint32_t* counts = nullptr;
  };

  void grow(std::int64_t bytes);

  int device_;
  PutHeap& heap_;
  std::chrono::milliseconds timeout_;
  int rank_;
  int size_;
  bool shares_device_ = false;
  int ranks_here_ = 1;
  std::int64_t bytes_ = 0;  // of a receive buffer
  // The counting words lie before the first one's receive buffer.
  std::array<std::shared_ptr<void>, kBuffers> buffers_;
  std::vector<Addresses> ranks_;
  std::vector<std::uint32_t> sent_, received_;  ///< Values of the words once all calls so far have ended.
  std::size_t turn_ = 0;
  Event used_;
  bool is_used_ = false;
};

}  // namespace flashoverlap::cuda

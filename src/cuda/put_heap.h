// Where memory that other ranks put into comes from, and how ranks find each other's.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "flashoverlap/communicator.h"
#include "flashoverlap/in_process.h"
#include "peer_reader.h"

namespace flashoverlap::cuda {

class PutHeap {
 public:
  PutHeap() = default;
  PutHeap(const PutHeap&) = delete;
  PutHeap& operator=(const PutHeap&) = delete;
  virtual ~PutHeap() = default;

  /// Memory of this rank, aligned to at least 256 bytes. Whoever lets go of it makes sure that no device
  /// writes there any more. Throws Error(kOutOfMemory) naming the bytes and `purpose`.
  [[nodiscard]] virtual std::shared_ptr<void> allocate(std::int64_t bytes, std::string_view purpose) = 0;

  /// Tells the other ranks of memory from `allocate`, and returns theirs, by rank, where kernels of this rank
  /// can write to it. Collective, on the host alone.
  virtual std::vector<PeerMemory> share(const PeerMemory& memory, const TransferLabel& label) = 0;

  /// Whether what `share` returned may be gone in the next call. If so, then on every rank.
  [[nodiscard]] virtual bool expires() const = 0;

  /// What puts to other ranks are paced to.
  [[nodiscard]] virtual LinkModel link() const = 0;
};

/// The memory that ranks of a local communicator write into.
class PeerHeap final : public PutHeap {
 public:
  /// `peers` must outlive this.
  PeerHeap(int device, PeerReader& peers) : device_(device), peers_(peers) {}

  [[nodiscard]] std::shared_ptr<void> allocate(std::int64_t bytes, std::string_view purpose) override;
  std::vector<PeerMemory> share(const PeerMemory& memory, const TransferLabel& label) override {
    return peers_.share_memory(memory, label);
  }
  /// Other calls of processes may close their mappings.
  [[nodiscard]] bool expires() const override { return peers_.readable_memory() == DeviceMemory::kShareable; }
  [[nodiscard]] LinkModel link() const override { return peers_.link(); }

 private:
  int device_;
  PeerReader& peers_;
};

}  // namespace flashoverlap::cuda

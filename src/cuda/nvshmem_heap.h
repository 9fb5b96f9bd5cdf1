// Receive buffers of puts in NVSHMEM's symmetric heap.
#pragma once

#include <vector>

#include "nvshmem_world.h"
#include "put_heap.h"

namespace flashoverlap::cuda {

/// Kernels write to the other ranks' memory where nvshmem_ptr says that it is: over NVLink and PCIe within a
/// host, and between hosts that share an NVLink domain.
class NvshmemHeap final : public PutHeap {
 public:
  /// Collective, on the host: see NvshmemWorld::join. Also throws Error(kUnsupported), on every rank, naming
  /// the ranks whose memory another one cannot write to. `communicator` must outlive this. `link`: what puts
  /// are paced to.
  NvshmemHeap(Communicator& communicator, int device, std::int64_t bytes, const LinkModel& link);

  [[nodiscard]] std::shared_ptr<void> allocate(std::int64_t bytes, std::string_view purpose) override {
    return world_.allocate(bytes, purpose);
  }
  std::vector<PeerMemory> share(const PeerMemory& memory, const TransferLabel& label) override;
  [[nodiscard]] bool expires() const override { return false; }
  [[nodiscard]] LinkModel link() const override { return link_; }

 private:
  Communicator& communicator_;
  LinkModel link_;
  NvshmemWorld& world_;
  std::vector<char*> begins_;  // of the ranks' memory, as this process addresses it
};

}  // namespace flashoverlap::cuda

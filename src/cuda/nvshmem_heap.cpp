#include "nvshmem_heap.h"

#include <fmt/ranges.h>

#include <array>
#include <cstring>
#include <string>

#include "comm/run_on_all.h"
#include "core/fail.h"
#include "core/host_name.h"
#include "peer_kernels.h"

namespace flashoverlap::cuda {

NvshmemHeap::NvshmemHeap(Communicator& communicator, int device, std::int64_t bytes, const LinkModel& link)
    : communicator_(communicator), link_(link), world_(NvshmemWorld::join(communicator, device, bytes)) {
  constexpr std::string_view kWhat = "NVSHMEM";
  const std::vector<std::uint64_t> pes =
      communicator.exchange(static_cast<std::uint64_t>(world_.pe()), {.operation = kWhat});
  const std::vector<std::string> hosts = communicator.exchange(core::host_name(), {.operation = kWhat});
  std::vector<std::string> out_of_reach;
  for (std::size_t r = 0; r < pes.size(); ++r) {
    begins_.push_back(world_.begin_of(static_cast<int>(pes[r])));
    if (begins_.back() == nullptr) out_of_reach.push_back(fmt::format("{} ({})", r, hosts[r]));
  }
  comm::run_on_all(communicator, kWhat, [&] {
    if (pes.size() > kMaxPeerRanks)
      core::fail(ErrorKind::kUnsupported, "puts between {} ranks: at most {}", pes.size(), kMaxPeerRanks);
    if (out_of_reach.empty()) return;
    core::fail(ErrorKind::kUnsupported,
               "kernels on {} cannot write to the memory of rank {} (rank, host): puts need GPUs that reach "
               "each other by NVLink or PCIe; use transport 'collective'",
               core::host_name(), fmt::join(out_of_reach, ", "));
  });
}

std::vector<PeerMemory> NvshmemHeap::share(const PeerMemory& memory, const TransferLabel& label) {
  using Offsets = std::array<std::ptrdiff_t, 2>;
  const Offsets own{static_cast<const char*>(memory.first) - world_.begin(),
                    static_cast<const char*>(memory.second) - world_.begin()};
  const std::vector<std::string> all =
      communicator_.exchange(std::string(reinterpret_cast<const char*>(&own), sizeof own), label);
  std::vector<PeerMemory> memories;
  for (std::size_t r = 0; r < all.size(); ++r) {
    Offsets offsets{};
    std::memcpy(&offsets, all[r].data(), sizeof offsets);
    memories.push_back({begins_[r] + offsets[0], begins_[r] + offsets[1]});
  }
  return memories;
}

}  // namespace flashoverlap::cuda

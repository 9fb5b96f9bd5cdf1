// Ranks that are threads of this process on the GPUs of this host: each rank's device and SMs, and what moves
// bytes between them. What `flashoverlap run`, `profile` and `tune` and the benchmarks have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "flashoverlap/cuda_context.h"

namespace flashoverlap::cuda {

enum class Transport {
  kNccl,
  kLocal,       ///< Kernels that read the other ranks' memory.
  kCopyEngine,  ///< PeerCopy::kCopyEngine and SumBy::kRestore: nothing takes an SM.
};

[[nodiscard]] std::string_view name_of(Transport transport);  ///< "nccl", "local", "copy-engine"

struct RankPlacement {
  Transport transport = Transport::kNccl;
  std::vector<int> devices;        ///< Of each rank.
  std::vector<CudaOptions> ranks;  ///< For each rank's executor.
  int max_ctas = 1;                ///< Of one rank's collectives.
  NcclBuffers nccl_buffers = NcclBuffers::kPlain;
  int units = 0;  ///< SMs of one rank, for the GEMM and for communication.
};

/// Rank r on device r; all on device 0 where there are fewer.
[[nodiscard]] std::vector<int> default_devices(int num_ranks);

/// Ranks on one device share it: each has SMs of its own for the GEMM, and `communication_sms` are left to
/// all of them together. Throws Error(kUnsupported) without a device, Error(kBadArgument) for a device that
/// is not there, no rank at all, or more SMs than there are.
[[nodiscard]] RankPlacement place_ranks(const std::vector<int>& devices, int communication_sms,
                                        Transport transport);

/// The communicators of such ranks.
class RankCommunicators {
 public:
  /// `placement` must outlive this. `link`: what transfers are paced to; not with NCCL, Error(kUnsupported).
  RankCommunicators(const RankPlacement& placement, const LinkModel& link);

  /// Of the rank that `control`, an in-process communicator of all of them, has. Collective.
  [[nodiscard]] std::shared_ptr<Communicator> connect(const std::shared_ptr<Communicator>& control) const;

  using OnRank = std::function<void(const std::shared_ptr<Communicator>&, const CudaOptions&)>;
  /// Connects `control`'s rank, and calls `on_rank` with its communicator and the options of its executor.
  /// What that throws aborts the communicator, so that no other rank waits for this one. Collective.
  void run(const std::shared_ptr<Communicator>& control, const OnRank& on_rank) const;

 private:
  const RankPlacement& placement_;
  std::vector<std::shared_ptr<Communicator>> locals_;
};

}  // namespace flashoverlap::cuda

#include "rank_placement.h"

#include <algorithm>
#include <map>

#include "core/fail.h"
#include "device.h"
#include "sm_partition.h"

namespace flashoverlap::cuda {
namespace {

/// The SMs of ranks that share a device.
std::vector<GpuPartition> share_device(int device, int num_ranks, int communication_sms) {
  const int left = splittable_sms(device) - communication_sms;
  const int each = left / num_ranks / kSmGroup * kSmGroup;
  if (each < kSmGroup) {
    core::fail(
        ErrorKind::kBadArgument,
        "{} ranks on device {} leave {} of its {} SMs to each beside {} for communication, at least {} are "
        "needed",
        num_ranks, device, std::max(0, left / num_ranks), num_sms(device), communication_sms, kSmGroup);
  }
  return make_rehearsal(device, num_ranks, each, communication_sms);
}

}  // namespace

std::string_view name_of(Transport transport) {
  switch (transport) {
    case Transport::kNccl:
      return "nccl";
    case Transport::kLocal:
      return "local";
    case Transport::kCopyEngine:
      return "copy-engine";
  }
  return "?";
}

std::vector<int> default_devices(int num_ranks) {
  const bool has_one_each = num_ranks <= device_count();
  std::vector<int> devices;
  for (int r = 0; r < num_ranks; ++r) devices.push_back(has_one_each ? r : 0);
  return devices;
}

RankPlacement place_ranks(const std::vector<int>& devices, int communication_sms, Transport transport) {
  if (devices.empty()) core::fail(ErrorKind::kBadArgument, "no device is named, each rank needs one");
  std::map<int, std::vector<std::size_t>> ranks_on;
  for (std::size_t r = 0; r < devices.size(); ++r) {
    require_device(devices[r]);
    ranks_on[devices[r]].push_back(r);
  }
  RankPlacement placement{.transport = transport, .devices = devices, .ranks = {}};
  placement.ranks.resize(devices.size());
  std::size_t most = 1;
  for (const auto& [device, ranks] : ranks_on) {
    most = std::max(most, ranks.size());
    std::vector<GpuPartition> partitions(ranks.size());
    if (ranks.size() > 1)
      partitions = share_device(device, static_cast<int>(ranks.size()), communication_sms);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      CudaOptions& options = placement.ranks[ranks[i]];
      options.device = device;
      options.communication_sms = communication_sms;
      options.partition = partitions[i];
      if (transport == Transport::kCopyEngine) options.sums = SumBy::kRestore;
      // A kernel that waits would find no SM.
      if (communication_sms == 0) options.wait = GroupWait::kStreamMemory;
    }
  }
  const int share = communication_sms / static_cast<int>(most);
  // Where no SM is left to them, no kernel of theirs runs beside a GEMM, so they need not be few.
  constexpr int kAlone = 32;
  placement.max_ctas = share > 0 ? share : kAlone;
  const auto& first = placement.ranks.front();
  placement.units =
      first.partition.compute == nullptr ? num_sms(first.device) : first.partition.compute->num_sms() + share;
  return placement;
}

RankCommunicators::RankCommunicators(const RankPlacement& placement, const LinkModel& link)
    : placement_(placement) {
  if (placement.transport != Transport::kNccl) {
    locals_ = make_local_gpu_communicators(
        placement.devices,
        {.link = link,
         .max_ctas = placement.max_ctas,
         .copies = placement.transport == Transport::kLocal ? PeerCopy::kKernel : PeerCopy::kCopyEngine});
  } else if (link.bandwidth_gbps > 0 || link.latency_us > 0) {
    core::fail(ErrorKind::kUnsupported,
               "NCCL cannot be paced to {} GB/s and {} us; local and copy-engine can", link.bandwidth_gbps,
               link.latency_us);
  }
}

std::shared_ptr<Communicator> RankCommunicators::connect(const std::shared_ptr<Communicator>& control) const {
  const auto rank = static_cast<std::size_t>(control->rank());
  if (!locals_.empty()) return locals_[rank];
  return make_nccl_communicator(control, {.device = placement_.devices[rank],
                                          .max_ctas = placement_.max_ctas,
                                          .buffers = placement_.nccl_buffers});
}

void RankCommunicators::run(const std::shared_ptr<Communicator>& control, const OnRank& on_rank) const {
  const std::shared_ptr<Communicator> communicator = connect(control);
  try {
    on_rank(communicator, placement_.ranks[static_cast<std::size_t>(control->rank())]);
  } catch (const std::exception& error) {
    communicator->abort(error.what());
    throw;
  }
}

}  // namespace flashoverlap::cuda

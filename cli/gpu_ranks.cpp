#include "gpu_ranks.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "core/fail.h"
#include "cuda/sm_partition.h"

namespace flashoverlap::cli {
namespace {

std::vector<int> devices_of(std::int64_t ranks, const GpuOptions& gpu) {
  const int available = cuda_device_count();
  if (available == 0) core::fail(ErrorKind::kUnsupported, "--backend cuda: this machine has no CUDA device");
  std::vector<int> devices;
  for (const std::int64_t device : gpu.devices) {
    if (device < 0 || device >= available) {
      core::fail(ErrorKind::kBadArgument, "--devices: {} is not a device of this machine, which has 0 to {}",
                 device, available - 1);
    }
    devices.push_back(static_cast<int>(device));
  }
  if (devices.empty()) {
    for (int r = 0; r < static_cast<int>(ranks); ++r) devices.push_back(ranks <= available ? r : 0);
  }
  if (std::ssize(devices) != ranks) {
    core::fail(ErrorKind::kBadArgument, "--devices lists {} devices for --ranks {}", devices.size(), ranks);
  }
  return devices;
}

}  // namespace

GpuRanks::GpuRanks(std::int64_t ranks, const GpuOptions& options, const LinkModel& link)
    : communicator_(options.communicator) {
  // Kernels loaded lazily behind a waiting stream hang, and ranks that share a GPU need their own queues.
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  devices_ = devices_of(ranks, options);
  place(options);
  const bool is_nccl = communicator_ == "nccl";
  if (is_nccl && link.bandwidth_gbps > 0) {
    core::fail(ErrorKind::kUnsupported,
               "--link-gbps {}: NCCL cannot be paced; use --comm local or copy-engine", link.bandwidth_gbps);
  }
  if (is_nccl) return;
  locals_ = make_local_gpu_communicators(
      devices_, {.link = link,
                 .max_ctas = ctas_,
                 .copies = communicator_ == "local" ? PeerCopy::kKernel : PeerCopy::kCopyEngine});
}

void GpuRanks::place(const GpuOptions& gpu) {
  std::map<int, std::vector<std::size_t>> ranks_on;
  for (std::size_t r = 0; r < devices_.size(); ++r) ranks_on[devices_[r]].push_back(r);
  ranks_.resize(devices_.size());
  const auto communication = static_cast<int>(gpu.communication_sms);
  std::size_t most = 1;
  for (const auto& [device, here] : ranks_on) {
    most = std::max(most, here.size());
    std::vector<GpuPartition> partitions(here.size());
    if (here.size() > 1) {
      const int left = cuda::splittable_sms(device) - communication;
      const int each = left / static_cast<int>(here.size()) / cuda::kSmGroup * cuda::kSmGroup;
      partitions = make_rehearsal(device, static_cast<int>(here.size()), each, communication);
    }
    for (std::size_t i = 0; i < here.size(); ++i) {
      CudaOptions& options = ranks_[here[i]];
      options.device = device;
      options.communication_sms = communication;
      options.partition = partitions[i];
      if (communicator_ == "copy-engine") options.sums = SumBy::kRestore;
      // A kernel that waits would find no SM.
      if (communication == 0) options.wait = GroupWait::kStreamMemory;
    }
  }
  ctas_ = std::max(1, communication / static_cast<int>(most));
}

std::shared_ptr<Communicator> GpuRanks::connect(const std::shared_ptr<Communicator>& control) const {
  const auto rank = static_cast<std::size_t>(control->rank());
  if (!locals_.empty()) return locals_[rank];
  return make_nccl_communicator(control, {.device = devices_[rank], .max_ctas = ctas_});
}

std::string GpuRanks::text() const {
  return fmt::format("{} on device{} {}", communicator_, devices_.size() > 1 ? "s" : "",
                     fmt::join(devices_, ","));
}

}  // namespace flashoverlap::cli

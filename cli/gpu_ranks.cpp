#include "gpu_ranks.h"

#include <fmt/ranges.h>

#include <set>

#include "core/fail.h"
#include "cuda/device.h"
#include "flashoverlap/cuda_context.h"

namespace flashoverlap::cli {

void require_gpu_type(DType dtype) {
  if (dtype != DType::kFloat32) return;
  core::fail(ErrorKind::kUnsupported, "--backend cuda computes bf16 and f16, not f32; add --dtype bf16");
}

std::vector<int> devices_of(std::int64_t ranks, const GpuOptions& gpu) {
  cuda::prepare_environment();
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
  if (devices.empty()) devices = cuda::default_devices(static_cast<int>(ranks));
  if (std::ssize(devices) != ranks) {
    core::fail(ErrorKind::kBadArgument, "--devices lists {} devices for --ranks {}", devices.size(), ranks);
  }
  return devices;
}

cuda::Transport transport_of(const GpuOptions& gpu) {
  if (gpu.communicator == "local") return cuda::Transport::kLocal;
  return gpu.communicator == "copy-engine" ? cuda::Transport::kCopyEngine : cuda::Transport::kNccl;
}

NcclBuffers nccl_buffers_of(const GpuOptions& gpu) {
  if (gpu.nccl_buffers == "registered") return NcclBuffers::kRegistered;
  return gpu.nccl_buffers == "symmetric" ? NcclBuffers::kSymmetric : NcclBuffers::kPlain;
}

bool has_repeated(const std::vector<int>& devices) {
  return std::set<int>(devices.begin(), devices.end()).size() < devices.size();
}

cuda::RankPlacement place_on_gpus(std::int64_t ranks, const GpuOptions& gpu) {
  const std::vector<int> devices = devices_of(ranks, gpu);
  cuda::RankPlacement placement =
      cuda::place_ranks(devices, gpu.sms(has_repeated(devices)), transport_of(gpu));
  placement.nccl_buffers = nccl_buffers_of(gpu);
  return placement;
}

GpuRanks::GpuRanks(std::int64_t ranks, const GpuOptions& options, const LinkModel& link)
    : communicator_(options.communicator_text()), placement_(place_on_gpus(ranks, options)) {
  const bool is_nccl = placement_.transport == cuda::Transport::kNccl;
  if (is_nccl && link.bandwidth_gbps > 0) {
    core::fail(ErrorKind::kUnsupported,
               "--link-gbps {}: NCCL cannot be paced; use --comm local or copy-engine", link.bandwidth_gbps);
  }
  communicators_.emplace(placement_, is_nccl ? LinkModel{} : link);
}

std::string GpuRanks::text() const {
  return fmt::format("{} on device{} {}", communicator_, placement_.devices.size() > 1 ? "s" : "",
                     fmt::join(placement_.devices, ","));
}

}  // namespace flashoverlap::cli

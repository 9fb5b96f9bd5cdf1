#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <utility>

#include "core/fail.h"
#include "cuda/check.h"
#include "cuda/device.h"
#include "gpu.h"

namespace flashoverlap::python {
namespace {

void check_devices(const GpuRanks& ranks) {
  cuda::prepare_environment();
  const int available = cuda_device_count();
  if (available == 0) core::fail(ErrorKind::kUnsupported, "this machine has no CUDA device");
  for (std::size_t rank = 0; rank < ranks.devices.size(); ++rank) {
    const int device = ranks.devices[rank];
    if (device >= 0 && device < available) continue;
    core::fail(ErrorKind::kBadArgument, "devices[{}] is {}; this machine has devices 0 to {}", rank, device,
               available - 1);
  }
}

std::map<int, std::vector<std::size_t>> ranks_by_device(const std::vector<int>& devices) {
  std::map<int, std::vector<std::size_t>> ranks_on;
  for (std::size_t rank = 0; rank < devices.size(); ++rank) ranks_on[devices[rank]].push_back(rank);
  return ranks_on;
}

PeerCopy copies_of(const GpuRanks& ranks) {
  return ranks.by_copy_engine ? PeerCopy::kCopyEngine : PeerCopy::kKernel;
}

}  // namespace

bool built_with_cuda() {
  return true;
}

int gpu_count() {
  cuda::prepare_environment();
  return cuda_device_count();
}

std::vector<CudaOptions> place_on_gpus(const GpuRanks& ranks) {
  check_devices(ranks);
  std::vector<CudaOptions> placed(ranks.devices.size());
  for (const auto& [device, here] : ranks_by_device(ranks.devices)) {
    std::vector<GpuPartition> partitions(here.size());
    if (here.size() > 1) {
      if (ranks.compute_sms == 0) {
        core::fail(ErrorKind::kBadArgument,
                   "{} ranks share device {}; expected compute_sms, the SMs of each: a multiple of 8",
                   here.size(), device);
      }
      partitions =
          make_rehearsal(device, static_cast<int>(here.size()), ranks.compute_sms, ranks.communication_sms);
    }
    for (std::size_t i = 0; i < here.size(); ++i) {
      placed[here[i]].device = device;
      placed[here[i]].communication_sms = ranks.communication_sms;
      placed[here[i]].partition = partitions[i];
      if (ranks.by_copy_engine) placed[here[i]].sums = SumBy::kRestore;
      // A kernel that waits would find no SM.
      if (ranks.communication_sms == 0) placed[here[i]].wait = GroupWait::kStreamMemory;
    }
  }
  return placed;
}

std::vector<std::shared_ptr<Communicator>> make_peer_communicators(const GpuRanks& ranks,
                                                                   const LinkModel& link) {
  check_devices(ranks);
  std::size_t most = 1;
  for (const auto& [device, here] : ranks_by_device(ranks.devices)) most = std::max(most, here.size());
  // The blocks of all ranks of a device must fit its communication SMs at once: they wait for each other.
  const int ctas = std::max(1, ranks.communication_sms / static_cast<int>(most));
  return make_local_gpu_communicators(ranks.devices,
                                      {.link = link, .max_ctas = ctas, .copies = copies_of(ranks)});
}

std::shared_ptr<Communicator> make_peer_communicator(std::shared_ptr<Communicator> control,
                                                     const GpuRanks& ranks) {
  check_devices(ranks);
  return make_local_gpu_communicator(
      std::move(control), ranks.devices.front(),
      {.link = {}, .max_ctas = std::max(1, ranks.communication_sms), .copies = copies_of(ranks)});
}

std::shared_ptr<Communicator> make_nccl(std::shared_ptr<Communicator> control, int device, int max_ctas) {
  cuda::prepare_environment();
  return make_nccl_communicator(std::move(control), {.device = device, .max_ctas = max_ctas});
}

std::unique_ptr<Context> make_gpu_context(std::shared_ptr<Communicator> communicator,
                                          const CudaOptions& options) {
  std::unique_ptr<Executor> executor = make_cuda_executor(communicator, options);
  return std::make_unique<Context>(std::move(communicator), std::move(executor));
}

void copy_on_gpu(int device, const DeviceRows& rows, void* stream) {
  const cuda::DeviceScope scope(device);
  FLASHOVERLAP_CUDA_CHECK(cudaMemcpy2DAsync(rows.to, rows.to_stride, rows.from, rows.from_stride,
                                            rows.row_bytes, rows.rows, cudaMemcpyDeviceToDevice,
                                            static_cast<cudaStream_t>(stream)));
}

}  // namespace flashoverlap::python

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/rank_placement.h"
#include "flashoverlap/cuda_context.h"
#include "gpu_options.h"

/// The ranks of `--backend cuda` as the library takes them. Only in builds with CUDA.
namespace flashoverlap::cli {

/// Error(kUnsupported) for a type that GPUs do not compute, which says how to choose another.
void require_gpu_type(DType dtype);

/// Of each rank. Before CUDA starts, sets what it needs in the environment, where that does not say
/// otherwise. Throws Error(kUnsupported) without a device, Error(kBadArgument) naming --devices.
[[nodiscard]] std::vector<int> devices_of(std::int64_t ranks, const GpuOptions& gpu);

[[nodiscard]] cuda::Transport transport_of(const GpuOptions& gpu);

[[nodiscard]] NcclBuffers nccl_buffers_of(const GpuOptions& gpu);

/// Whether several ranks are on one device.
[[nodiscard]] bool has_repeated(const std::vector<int>& devices);

[[nodiscard]] cuda::RankPlacement place_on_gpus(std::int64_t ranks, const GpuOptions& gpu);

/// Where the ranks run, on which SMs, and how they exchange.
class GpuRanks {
 public:
  /// `link`: what the exchange is paced to. Errors name the option.
  GpuRanks(std::int64_t ranks, const GpuOptions& options, const LinkModel& link);
  GpuRanks(const GpuRanks&) = delete;
  GpuRanks& operator=(const GpuRanks&) = delete;

  /// As RankCommunicators::run.
  void run(const std::shared_ptr<Communicator>& control,
           const cuda::RankCommunicators::OnRank& on_rank) const {
    communicators_->run(control, on_rank);
  }
  /// "nccl on devices 0,1"
  [[nodiscard]] std::string text() const;

 private:
  std::string communicator_;
  cuda::RankPlacement placement_;
  std::optional<cuda::RankCommunicators> communicators_;
};

}  // namespace flashoverlap::cli

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashoverlap/cuda_context.h"
#include "gpu_run.h"

/// Where the ranks of `--backend cuda` run, on which SMs, and how they exchange.
namespace flashoverlap::cli {

class GpuRanks {
 public:
  /// Sets what CUDA needs of the environment, so it comes before CUDA starts. `link`: what the exchange is
  /// paced to. Errors name the option.
  GpuRanks(std::int64_t ranks, const GpuOptions& options, const LinkModel& link);

  [[nodiscard]] const CudaOptions& options_of(int rank) const {
    return ranks_[static_cast<std::size_t>(rank)];
  }
  /// The communicator of `control`'s rank. Collective.
  [[nodiscard]] std::shared_ptr<Communicator> connect(const std::shared_ptr<Communicator>& control) const;
  /// "nccl on devices 0,1"
  [[nodiscard]] std::string text() const;

 private:
  void place(const GpuOptions& options);

  std::string communicator_;
  std::vector<int> devices_;
  std::vector<CudaOptions> ranks_;
  int ctas_ = 0;  ///< Of one rank's collectives.
  std::vector<std::shared_ptr<Communicator>> locals_;
};

}  // namespace flashoverlap::cli

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "gpu_run.h"
#include "moe_measure.h"
#include "moe_splits.h"

/// `flashoverlap run moe-layer --backend cuda`.
namespace flashoverlap::cli {

/// Forward or backward: medians of whole calls of the slowest rank, the meeting of the ranks on the host
/// included.
struct GpuMoePass {
  double serial_us = 0;
  double overlap_us = 0;
  double speedup = 0;  ///< Median over pairs of calls that follow each other.
};

/// The two GEMMs of the forward with their transfers, each by itself with all ranks beginning together:
/// medians of the slowest rank. As MoePass.
struct GpuMoePhases {
  MoePhases serial, overlap;  ///< dispatch_us and combine_us.
  double combine_speedup = 0;
  double dispatch_hidden = 0;
  double combine_hidden = 0;
  MoeLayer::Parts parts;
  double backlog_us = 0;  ///< Transport put.
  double consumer_idle = 0;
};

struct GpuMoeResult {
  std::string communicator;
  GpuMoePass forward;
  GpuMoePhases phases;
  std::optional<GpuMoePass> backward;
  std::optional<MoeChosen> chosen;  ///< Where the layer decides itself.
  MoeTransport transport = MoeTransport::kCollective;
  MoeSetting setting;      ///< Of the last call.
  std::string adaptation;  ///< Before it.
  double error = 0;        ///< Largest relative error of the tokens checked.
  std::int64_t checked = 0;
  double gradient_error = 0;  ///< Likewise, of gradients.
  std::int64_t gradients_checked = 0;
  bool equals_serial = true;
  MoeWaste waste;  ///< Of all ranks.
  std::int64_t dropped_rows = 0;
};

/// Error(kUnsupported) in a build without CUDA, where there is no device, and for what layers
/// on GPUs cannot do yet, naming the option.
GpuMoeResult measure_moe_on_gpus(MoeRun& run, const GpuOptions& gpu);
/// As measure_moe_splits. The same errors.
MoeSplits measure_moe_splits_on_gpus(MoeRun& run, const GpuOptions& gpu);

}  // namespace flashoverlap::cli

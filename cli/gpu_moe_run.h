#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "gpu_run.h"
#include "moe_measure.h"

/// `flashoverlap run moe-layer --backend cuda`.
namespace flashoverlap::cli {

/// Forward or backward: medians of whole calls of the slowest rank, the meeting of the ranks on the host
/// included.
struct GpuMoePass {
  double serial_us = 0;
  double overlap_us = 0;
  double speedup = 0;  ///< Median over pairs of calls that follow each other.
};

struct GpuMoeResult {
  std::string communicator;
  GpuMoePass forward;
  std::optional<GpuMoePass> backward;
  double error = 0;  ///< Largest relative error of the tokens checked.
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

}  // namespace flashoverlap::cli

#pragma once

#include <cstdint>
#include <string>

#include "gpu_run.h"
#include "moe_measure.h"

/// `flashoverlap run moe-layer --backend cuda`.
namespace flashoverlap::cli {

/// Times are medians of whole forwards of the slowest rank, the exchange of counts on the host included.
struct GpuMoeResult {
  std::string communicator;
  double serial_us = 0;
  double overlap_us = 0;
  double speedup = 0;  ///< Median over pairs of calls that follow each other.
  double error = 0;    ///< Largest relative error of the tokens checked.
  std::int64_t checked = 0;
  bool equals_serial = true;
  MoeWaste waste;  ///< Of all ranks.
  std::int64_t dropped_rows = 0;
};

/// Forward only. Error(kUnsupported) in a build without CUDA, where there is no device, and for what layers
/// on GPUs cannot do yet, naming the option.
GpuMoeResult measure_moe_on_gpus(MoeRun& run, const GpuOptions& gpu);

}  // namespace flashoverlap::cli

#pragma once

#include "gpu_options.h"
#include "run_measure.h"

/// `flashoverlap run --backend cuda`.
namespace flashoverlap::cli {

/// As `measure`, on GPUs. Error(kUnsupported) in a build without CUDA, and where there is no device.
RunResult measure_on_gpus(const RunOptions& options, const GpuOptions& gpu);

}  // namespace flashoverlap::cli

// Stands in for gpu_run.cpp in builds without CUDA.
#include "core/fail.h"
#include "gpu_run.h"

namespace flashoverlap::cli {

RunResult measure_on_gpus(const RunOptions& /*options*/, const GpuOptions& /*gpu*/) {
  core::fail(
      ErrorKind::kUnsupported,
      "--backend cuda: this build has no GPU executor; build with the preset cuda (-DFLASHOVERLAP_CUDA=ON)");
}

}  // namespace flashoverlap::cli

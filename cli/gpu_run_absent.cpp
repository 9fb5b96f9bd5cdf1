// Stands in for gpu_run.cpp and gpu_moe_run.cpp in builds without CUDA.
#include "core/fail.h"
#include "gpu_moe_run.h"
#include "gpu_run.h"

namespace flashoverlap::cli {
namespace {

[[noreturn]] void fail_without_cuda() {
  core::fail(
      ErrorKind::kUnsupported,
      "--backend cuda: this build has no GPU executor; build with the preset cuda (-DFLASHOVERLAP_CUDA=ON)");
}

}  // namespace

RunResult measure_on_gpus(const RunOptions& /*options*/, const GpuOptions& /*gpu*/) {
  fail_without_cuda();
}

GpuMoeResult measure_moe_on_gpus(MoeRun& /*run*/, const GpuOptions& /*gpu*/) {
  fail_without_cuda();
}

}  // namespace flashoverlap::cli

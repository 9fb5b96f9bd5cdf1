// Stands in for gpu_run.cpp, gpu_layer_run.cpp, gpu_moe_run.cpp, gpu_sliced_run.cpp and gpu_machine.cpp in
// builds without CUDA.
#include "core/fail.h"
#include "gpu_machine.h"
#include "gpu_moe_run.h"
#include "gpu_run.h"
#include "layer_measure.h"
#include "sliced_measure.h"

namespace flashoverlap::cli {
namespace {

[[noreturn]] void refuse() {
  core::fail(
      ErrorKind::kUnsupported,
      "--backend cuda: this build has no GPU executor; build with the preset cuda (-DFLASHOVERLAP_CUDA=ON)");
}

}  // namespace

RunResult measure_on_gpus(const RunOptions& /*options*/, const GpuOptions& /*gpu*/) {
  refuse();
}

GpuMoeResult measure_moe_on_gpus(MoeRun& /*run*/, const GpuOptions& /*gpu*/) {
  refuse();
}

MoeSplits measure_moe_splits_on_gpus(MoeRun& /*run*/, const GpuOptions& /*gpu*/) {
  refuse();
}

SlicedResult measure_sliced_on_gpus(const SlicedProblem& /*problem*/, const SlicedRun& /*run*/) {
  refuse();
}

LayerResult measure_layer_on_gpus(const LayerRun& /*run*/) {
  refuse();
}

GpuMachine gpu_machine(std::int64_t /*ranks*/, const GpuOptions& /*gpu*/) {
  refuse();
}

std::vector<TileShape> gpu_tiles(const ProblemOptions& /*problem*/, const GpuOptions& /*gpu*/) {
  refuse();
}

MachineProfile measure_gpu_profile(const ProfileOptions& /*profile*/, const GpuOptions& /*gpu*/,
                                   const Progress& /*progress*/) {
  refuse();
}

}  // namespace flashoverlap::cli

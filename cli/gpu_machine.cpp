#include "gpu_machine.h"

#include <algorithm>
#include <cstdlib>

#include "core/fail.h"
#include "cuda/gemm_choice.h"
#include "cuda/measure_machine.h"
#include "gpu_ranks.h"

namespace flashoverlap::cli {
namespace {

std::vector<int> measured_sms(const GpuOptions& gpu, bool shares_devices) {
  if (!gpu.communication_sms.empty()) return {gpu.communication_sms.begin(), gpu.communication_sms.end()};
  if (shares_devices) return {gpu.sms(true)};  // SMs of the ranks depend on it
  return gpu.communicator == "copy-engine" ? std::vector{0, 2} : std::vector{24, 16, 8};
}

}  // namespace

GpuMachine gpu_machine(std::int64_t ranks, const GpuOptions& gpu) {
  const cuda::RankPlacement placement = place_on_gpus(ranks, gpu);
  const Provenance found = cuda::describe_machine(placement);
  return {.identity = {.device = found.device, .driver = found.driver, .libraries = found.libraries},
          .units = placement.units,
          .shares_devices = has_repeated(placement.devices),
          .max_ctas = placement.max_ctas};
}

std::vector<TileShape> gpu_tiles(const ProblemOptions& problem, const GpuOptions& gpu) {
  const cuda::RankPlacement placement = place_on_gpus(problem.ranks, gpu);
  CudaOptions options = placement.ranks.front();
  options.sums = SumBy::kCommunicator;  // nothing is added here
  const auto alone = make_local_gpu_communicators({options.device}).front();
  std::vector<TileShape> tiles;
  for (const cuda::SignalGemmVariant* variant : cuda::variants_for(options.device, problem.dtype)) {
    options.gemm_variant = variant->name;
    try {
      const auto shape =
          make_cuda_executor(alone, options)
              ->suggest({.m = problem.m, .n = problem.n, .k = problem.k, .dtype = problem.dtype});
      const TileShape tile{shape->tile_m, shape->tile_n, shape->swizzle};
      if (std::find(tiles.begin(), tiles.end(), tile) == tiles.end()) tiles.push_back(tile);
    } catch (const Error& error) {  // one that cannot take operands of this k
      if (error.kind() != ErrorKind::kUnsupported) throw;
    }
  }
  return tiles;
}

MachineProfile measure_gpu_profile(const ProfileOptions& profile, const GpuOptions& gpu,
                                   const Progress& progress) {
  cuda::MachineSettings settings;
  settings.devices = devices_of(profile.ranks, gpu);
  settings.communication_sms = measured_sms(gpu, has_repeated(settings.devices));
  settings.transport = transport_of(gpu);
  settings.dtypes = profile.dtypes;
  settings.repetitions = profile.repetitions;
  settings.measured_by = fmt::format("flashoverlap profile --backend cuda --ranks {} --comm {}",
                                     profile.ranks, gpu.communicator);
  settings.progress = progress;
  return cuda::measure_machine(settings);
}

}  // namespace flashoverlap::cli

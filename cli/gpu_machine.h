#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/tuner.h"
#include "flashoverlap/tuning_cache.h"
#include "gpu_options.h"
#include "problem_options.h"
#include "profile_measure.h"

/// The GPUs as profile, tune and run know them. Everything here throws Error(kUnsupported) in a build without
/// CUDA, and where there is no device.
namespace flashoverlap::cli {

struct GpuMachine {
  MachineIdentity identity;
  std::int64_t units = 0;       ///< SMs of one rank, for the GEMM and for communication.
  bool shares_devices = false;  ///< Several ranks on one device.
  std::int64_t max_ctas = 0;    ///< Communication units of one rank, with GpuOptions::sms of a device.
};

[[nodiscard]] GpuMachine gpu_machine(std::int64_t ranks, const GpuOptions& gpu);

/// The tiles that this machine's GEMMs have for the problem, each with the swizzle that suits it.
[[nodiscard]] std::vector<TileShape> gpu_tiles(const ProblemOptions& problem, const GpuOptions& gpu);

/// `profile.threads` is not looked at. Without communication SMs in `gpu`: 24, 16 and 8, and 0 and 2 for
/// copies.
[[nodiscard]] MachineProfile measure_gpu_profile(const ProfileOptions& profile, const GpuOptions& gpu,
                                                 const Progress& progress);

}  // namespace flashoverlap::cli

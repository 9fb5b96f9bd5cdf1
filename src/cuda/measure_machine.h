// A machine profile of GPUs by measurement.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "rank_placement.h"

namespace flashoverlap::cuda {

struct MachineSettings {
  std::vector<int> devices{0, 1};          ///< Of each rank; ranks on one device share it (place_ranks).
  std::vector<int> communication_sms{16};  ///< One set of curves for each; NCCL gets as many blocks.
  Transport transport = Transport::kNccl;
  std::vector<DType> dtypes{DType::kBFloat16};  ///< Of the GEMMs; bf16 and f16.
  std::int64_t repetitions = 9;                 ///< Of each measurement; medians are kept.
  std::string measured_by = "flashoverlap profile";
  /// Hears of each step: those done, those in all, the next one's name. On one of the ranks' threads; may be
  /// null.
  std::function<void(std::int64_t, std::int64_t, const std::string&)> progress;
};

/// A profile with measured provenance. GEMM kernels: one for each tile of the signal GEMM, fitted to GEMMs of
/// four k on the SMs that the first entry of communication_sms leaves; tiles are plans' tiles, of which a
/// cluster's SMs compute one together. Curves of all-reduce, reduce-scatter, all-gather, all-to-all, of a
/// send with a receive, and of peer copies (put, no SMs). All ranks work at the same time; the slowest rank's
/// time counts. Not measured: launch and signal times, which are one H200's, and what GEMM and transfers take
/// from each other. Throws Error: as place_ranks, and what communicators and devices throw.
[[nodiscard]] MachineProfile measure_machine(const MachineSettings& settings);

/// What the devices and libraries are; `kind`, `date` and `sources` are empty. Throws as place_ranks does.
[[nodiscard]] Provenance describe_machine(const RankPlacement& placement);

}  // namespace flashoverlap::cuda

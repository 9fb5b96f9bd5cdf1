// Collectives, messages and copies between GPUs as curves of a machine profile, with the GEMM beside them.
#pragma once

#include <vector>

#include "flashoverlap/machine_profile.h"
#include "gpu_ranks.h"

namespace bench {

struct CurveSettings {
  int world_size = 2;
  std::vector<int> communication_sms{16};  ///< One set of curves for each; NCCL gets as many blocks.
  int repetitions = 9;                     ///< Medians of these.
  bool rehearse = false;                   ///< All ranks on one GPU.
};

/// A profile with measured provenance: GEMM kernels fitted to the signal GEMM on what the first entry of
/// communication_sms leaves, curves of all-reduce, reduce-scatter, all-gather, all-to-all and of a send with
/// a receive ("send"), and of peer copies by the copy engine ("put", no SMs), all ranks at once, the slowest
/// rank's time.
flashoverlap::MachineProfile measure_machine(const CurveSettings& settings);

}  // namespace bench

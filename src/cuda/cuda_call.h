// One execution of a plan by the GPU executor.
#pragma once

#include "cuda_executor.h"

namespace flashoverlap::cuda {

/// With everything that its steps need.
struct CudaExecutor::Call {
  PreparedCudaPlan& prepared;
  const Operands& operands;
  Mode mode;
  cudaStream_t stream;  // the caller's
  bool is_captured;
  EventLog& log;
  // Where the tiles that are stored in place go, and what the epilogue reads: the caller's output, or a dense
  // stand-in.
  void* output = nullptr;
  std::int64_t ldo = 0;
  bool is_gated = false;                   ///< Tiles wait for slices.
  bool is_decomposed = false;              ///< So do launches in their place, by events.
  std::vector<std::size_t> channels = {};  ///< Those that the call's transfers use.
  bool puts = false;                       ///< Results travel by puts, see PutWindow.

  [[nodiscard]] const OverlapPlan& plan() const { return prepared.plan(); }
  [[nodiscard]] bool communicates() const { return mode == Mode::kRun || mode == Mode::kCommunicationOnly; }
};

}  // namespace flashoverlap::cuda

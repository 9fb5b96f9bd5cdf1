#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "flashoverlap/communicator.h"
#include "flashoverlap/executor.h"

namespace flashoverlap {

struct CpuExecutorOptions {
  int num_threads = 1;  ///< Compute threads, >= 1; the thread that calls `execute` is one of them.
  std::int64_t workspace_limit_bytes = 0;  ///< Error(kOutOfMemory) when a plan needs more; 0: no limit.
  bool poison_workspace = false;           ///< Fill the workspace with NaN before each run (tests).
  ExecutorHooks hooks = {};
};

/// Carries out plans on threads: a pool for the tiles, and for each channel of the plan one stream of
/// `communicator` that waits for wave groups and starts their transfers. May have more threads than there are
/// cores: waiting never spins.
///
/// The tile product is OpenBLAS's, one call per tile on the thread that computes it. While a run is in
/// progress anywhere in the process, OpenBLAS's own thread count is set to 1, and put back afterwards: other
/// users of the same OpenBLAS in the process then compute on one thread.
///
/// Throws Error(kBadArgument) for num_threads < 1 or a null communicator, Error(kUnsupported) when the
/// communicator's streams are not HostStreams.
[[nodiscard]] std::unique_ptr<Executor> make_cpu_executor(std::shared_ptr<Communicator> communicator,
                                                          const CpuExecutorOptions& options = {});

/// Name, version and core type of the library that computes tiles, for reports.
[[nodiscard]] std::string cpu_blas_name();

}  // namespace flashoverlap

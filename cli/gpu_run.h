#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "run_measure.h"

/// `flashoverlap run --backend cuda`.
namespace flashoverlap::cli {

struct GpuOptions {
  std::string backend = "cpu";  ///< Or "cuda".
  /// Or "local": kernels that read the other ranks' memory; or "copy-engine": PeerCopy::kCopyEngine and
  /// SumBy::kRestore.
  std::string communicator = "nccl";
  /// Rank r runs on devices[r]; ranks on the same device share its SMs. Empty: rank r on device r, or all on
  /// device 0 where there is only one.
  std::vector<std::int64_t> devices;
  std::int64_t communication_sms = 24;  ///< Of each device, left to communication.

  [[nodiscard]] bool on_gpus() const { return backend == "cuda"; }
};

/// --backend and what goes with it.
void add_gpu_options(CLI::App& app, const std::shared_ptr<GpuOptions>& gpu);
/// Throws CLI::ValidationError where ranks are processes, and --backend is not the CPU's.
void check_backend(const GpuOptions& gpu);

/// As `measure`, on GPUs. Error(kUnsupported) in a build without CUDA, and where there is no device.
RunResult measure_on_gpus(const RunOptions& options, const GpuOptions& gpu);

}  // namespace flashoverlap::cli

#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

/// --backend cuda and what goes with it, as run, profile and tune have it.
namespace flashoverlap::cli {

struct GpuOptions {
  std::string backend = "cpu";
  /// Or "local": kernels that read the other ranks' memory; or "copy-engine": PeerCopy::kCopyEngine and
  /// SumBy::kRestore.
  std::string communicator = "nccl";
  /// Or "registered", "symmetric": see NcclBuffers.
  std::string nccl_buffers = "plain";
  /// Rank r runs on devices[r]; ranks on the same device share its SMs. Empty: rank r on device r, or all on
  /// device 0 where there are fewer.
  std::vector<std::int64_t> devices;
  /// Of each device, left to communication. Empty: not given.
  std::vector<std::int64_t> communication_sms;
  bool decomposed = false;  ///< Measure GemmForm::kDecomposed, too; where add_decomposed_option was called.

  [[nodiscard]] bool on_gpus() const { return backend == "cuda"; }
  /// The first one, or what `run` takes where nothing else is known. `shares_devices`: whether several ranks
  /// are on one device.
  [[nodiscard]] int sms(bool shares_devices) const;
  /// "nccl", "nccl with symmetric buffers": what times depend on.
  [[nodiscard]] std::string communicator_text() const;
};

enum class SmsOption { kOne, kSeveral };

/// --decomposed, for what is measured in slices.
void add_decomposed_option(CLI::App& app, const std::shared_ptr<GpuOptions>& options);

/// Throws CLI::ValidationError for options that say nothing without --backend cuda, or without NCCL.
void check_gpu_options(const GpuOptions& options);

/// Throws CLI::ValidationError where ranks are processes, and --backend is not the CPU's.
void check_backend(const GpuOptions& gpu);

/// --backend and what goes with it. `sms_description`: of --sms-communication.
void add_gpu_options(CLI::App& app, const std::shared_ptr<GpuOptions>& options,
                     SmsOption sms = SmsOption::kOne,
                     const std::string& sms_description =
                         "SMs of each device that the GEMM leaves to communication;\n"
                         "when not given: 24 for NCCL and where ranks share a device, 16 for local,\n"
                         "0 for copy-engine");

}  // namespace flashoverlap::cli

#include "gpu_options.h"

#include "option_values.h"
#include "process_ranks.h"

namespace flashoverlap::cli {
namespace {

// NCCL beside a GEMM on an H200 is as quick with these as with all SMs (docs/gpu-cluster.md).
constexpr int kNcclSms = 24;
constexpr int kLocalSms = 16;

}  // namespace

int GpuOptions::sms(bool shares_devices) const {
  if (!communication_sms.empty()) return static_cast<int>(communication_sms.front());
  if (shares_devices || communicator == "nccl") return kNcclSms;
  return communicator == "local" ? kLocalSms : 0;
}

std::string GpuOptions::communicator_text() const {
  return nccl_buffers == GpuOptions{}.nccl_buffers ? communicator
                                                   : communicator + " with " + nccl_buffers + " buffers";
}

void check_backend(const GpuOptions& gpu) {
  if (gpu.on_gpus() && is_job()) {
    throw CLI::ValidationError("--backend",
                               "cuda is for ranks in one process; leave mpirun or --processes out");
  }
}

void check_gpu_options(const GpuOptions& options) {
  const bool has_buffers = options.nccl_buffers != GpuOptions{}.nccl_buffers;
  if (options.on_gpus()) {
    if (has_buffers && options.communicator != "nccl")
      throw CLI::ValidationError("--nccl-buffers", "is for NCCL; add --comm nccl");
    return;
  }
  const auto refuse = [](const char* option) {
    throw CLI::ValidationError(option, "is for GPUs; add --backend cuda");
  };
  if (!options.devices.empty()) refuse("--devices");
  if (!options.communication_sms.empty()) refuse("--sms-communication");
  if (options.communicator != GpuOptions{}.communicator) refuse("--comm");
  if (has_buffers) refuse("--nccl-buffers");
  if (options.decomposed) refuse("--decomposed");
}

void add_decomposed_option(CLI::App& app, const std::shared_ptr<GpuOptions>& options) {
  app.add_flag("--decomposed", options->decomposed,
               "With --backend cuda: also measure the same slices with a GEMM launch for each of them,\n"
               "instead of one GEMM whose tiles wait and signal");
}

void add_gpu_options(CLI::App& app, const std::shared_ptr<GpuOptions>& options, SmsOption sms,
                     const std::string& sms_description) {
  add_choice(app, "--backend", options->backend, {"cpu", "cuda"}, "What computes")->default_str("cpu");
  add_choice(app, "--comm", options->communicator, {"nccl", "local", "copy-engine"},
             "With --backend cuda: NCCL; kernels that read the other ranks' memory; or copies that take\n"
             "no SM, with partial sums added behind the GEMM")
      ->default_str("nccl");
  add_choice(app, "--nccl-buffers", options->nccl_buffers, {"plain", "registered", "symmetric"},
             "With --comm nccl: what NCCL knows of the memory that partial sums are taken in and\n"
             "results received in; registered and symmetric need NCCL 2.30.7 and a device a rank")
      ->default_str("plain");
  app.add_option_function<std::string>(
         "--devices",
         [options](const std::string& text) {
           constexpr IntegerRange kDevices{0, 1023};
           options->devices = parse_integer_list("--devices", text, kDevices);
         },
         "With --backend cuda: the device of each rank; ranks on one device share its SMs.\n"
         "When not given: one device a rank, or device 0 for all where there are fewer")
      ->type_name("LIST");
  app.add_option_function<std::string>(
         "--sms-communication",
         [options, sms](const std::string& text) {
           constexpr IntegerRange kSms{0, 1024};
           const std::string name = "--sms-communication";
           options->communication_sms = sms == SmsOption::kOne ? std::vector{parse_integer(name, text, kSms)}
                                                               : parse_integer_list(name, text, kSms);
         },
         "With --backend cuda: " + sms_description)
      ->type_name(sms == SmsOption::kOne ? "INT" : "LIST");
}

}  // namespace flashoverlap::cli

#include <memory>

#include "gpu_run.h"
#include "option_values.h"
#include "process_ranks.h"

namespace flashoverlap::cli {

void add_gpu_options(CLI::App& app, const std::shared_ptr<GpuOptions>& gpu) {
  add_choice(app, "--backend", gpu->backend, {"cpu", "cuda"}, "What computes")->default_str("cpu");
  add_choice(app, "--comm", gpu->communicator, {"nccl", "local", "copy-engine"},
             "With --backend cuda: NCCL; kernels that read the other ranks' memory; or copies that take\n"
             "no SM, with partial sums added behind the GEMM")
      ->default_str("nccl");
  app.add_option_function<std::string>(
         "--devices",
         [gpu](const std::string& text) {
           constexpr IntegerRange kDevices{0, 1023};
           gpu->devices = parse_integer_list("--devices", text, kDevices);
         },
         "With --backend cuda: the device of each rank; ranks on one device share its SMs.\n"
         "When not given: one device a rank, or device 0 for all where there are fewer")
      ->type_name("LIST");
  constexpr IntegerRange kSms{0, 1024};
  add_integer(app, "--sms-communication", gpu->communication_sms, kSms,
              "With --backend cuda: SMs of each device that the GEMM leaves to communication")
      ->default_str(std::to_string(gpu->communication_sms));
}

void check_backend(const GpuOptions& gpu) {
  if (gpu.on_gpus() && is_job()) {
    throw CLI::ValidationError("--backend",
                               "cuda is for ranks in one process; leave mpirun or --processes out");
  }
}

}  // namespace flashoverlap::cli

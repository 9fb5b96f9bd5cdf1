#include "context.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "flashoverlap/call_tuner.h"
#include "flashoverlap/cpu_executor.h"
#include "gpu.h"

namespace flashoverlap::python {
namespace {

std::shared_ptr<GuardedContext> make_context(std::shared_ptr<Communicator> communicator, int num_threads,
                                             std::int64_t workspace_limit_bytes, bool poison_workspace) {
  const nb::gil_scoped_release release;
  ContextOptions options;
  options.num_threads = num_threads;
  options.workspace_limit_bytes = workspace_limit_bytes;
  options.poison_workspace = poison_workspace;
  return std::make_shared<GuardedContext>(std::make_unique<Context>(std::move(communicator), options), -1);
}

std::shared_ptr<GuardedContext> make_context_on_gpu(std::shared_ptr<Communicator> communicator,
                                                    CudaOptions place, std::int64_t workspace_limit_bytes,
                                                    bool poison_workspace) {
  const nb::gil_scoped_release release;
  place.workspace_limit_bytes = workspace_limit_bytes;
  place.poison_workspace = poison_workspace;
  return std::make_shared<GuardedContext>(make_gpu_context(std::move(communicator), place), place.device);
}

void use_tuner(GuardedContext& self, const std::optional<std::string>& machine, const std::string& cache_path,
               const std::string& device, const nb::callable& warn) {
  CallTuner::Options options;
  if (machine) options.machine = load_machine_profile(*machine);
  options.cache_path = cache_path;
  options.identity = {.device = device, .driver = "", .libraries = {{"blas", cpu_blas_name()}}};
  options.communicator = std::string(self.context.communicator().name());
  options.warn = [sink = warn](const std::string& text) {
    const nb::gil_scoped_acquire acquire;
    sink(text);
  };
  // The sink may go on a thread without the interpreter's lock.
  std::shared_ptr<const CallTuner> tuner(new CallTuner(std::move(options)), [](const CallTuner* gone) {
    const nb::gil_scoped_acquire acquire;
    delete gone;
  });
  const auto lock = self.enter();
  self.context.set_tuner(std::move(tuner));
}

GpuRanks gpu_ranks(const std::vector<int>& devices, int compute_sms, int communication_sms,
                   bool by_copy_engine) {
  return {.devices = devices,
          .communication_sms = communication_sms,
          .compute_sms = compute_sms,
          .by_copy_engine = by_copy_engine};
}

void bind_gpu(nb::module_& module) {
  nb::class_<CudaOptions>(module, "GpuPlace", "The device of a rank, and its SMs.")
      .def_ro("device", &CudaOptions::device)
      .def_ro("communication_sms", &CudaOptions::communication_sms);
  module.attr("built_with_cuda") = built_with_cuda();
  module.def("gpu_count", gpu_count);
  module.def(
      "place_on_gpus",
      [](const std::vector<int>& devices, int compute_sms, int communication_sms, bool by_copy_engine) {
        return place_on_gpus(gpu_ranks(devices, compute_sms, communication_sms, by_copy_engine));
      },
      nb::arg("devices"), nb::arg("compute_sms"), nb::arg("communication_sms"), nb::arg("by_copy_engine"));
  module.def(
      "make_peer_communicators",
      [](const std::vector<int>& devices, int communication_sms, bool by_copy_engine, double bandwidth_gbps,
         double latency_us) {
        const LinkModel link{.bandwidth_gbps = bandwidth_gbps, .latency_us = latency_us};
        return make_peer_communicators(gpu_ranks(devices, 0, communication_sms, by_copy_engine), link);
      },
      nb::arg("devices"), nb::arg("communication_sms"), nb::arg("by_copy_engine"), nb::arg("bandwidth_gbps"),
      nb::arg("latency_us"));
  module.def(
      "make_peer_communicator",
      [](std::shared_ptr<Communicator> control, int device, int communication_sms, bool by_copy_engine) {
        return make_peer_communicator(std::move(control),
                                      gpu_ranks({device}, 0, communication_sms, by_copy_engine));
      },
      nb::arg("control"), nb::arg("device"), nb::arg("communication_sms"), nb::arg("by_copy_engine"),
      nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "make_nccl_communicator",
      [](std::shared_ptr<Communicator> control, int device, int max_ctas) {
        return make_nccl(std::move(control), device, max_ctas);
      },
      nb::arg("control"), nb::arg("device"), nb::arg("max_ctas"), nb::call_guard<nb::gil_scoped_release>());
  module.def("make_gpu_context", make_context_on_gpu, nb::arg("communicator"), nb::arg("place"),
             nb::arg("workspace_limit_bytes"), nb::arg("poison_workspace"));
}

}  // namespace

void bind_context(nb::module_& module) {
  nb::class_<GuardedContext>(module, "Context")
      .def("use_tuner", use_tuner, nb::arg("machine").none(), nb::arg("cache_path"), nb::arg("device"),
           nb::arg("warn"))
      .def_prop_ro("num_threads", [](const GuardedContext& self) { return self.context.num_threads(); })
      .def_prop_ro("workspace_bytes",
                   [](const GuardedContext& self) { return self.context.workspace_bytes(); });
  module.def("make_context", make_context, nb::arg("communicator"), nb::arg("num_threads"),
             nb::arg("workspace_limit_bytes"), nb::arg("poison_workspace"));
  bind_gpu(module);
}

}  // namespace flashoverlap::python

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "bindings.h"
#include "context.h"
#include "core/fail.h"
#include "flashoverlap/moe_layer.h"
#include "names.h"

namespace flashoverlap::python {
namespace {

/// Keeps the context for as long as the layer, which works in it.
struct Layer {
  std::shared_ptr<GuardedContext> context;
  std::unique_ptr<MoeLayer> moe;

  Layer(std::shared_ptr<GuardedContext> context_, std::unique_ptr<MoeLayer> moe_)
      : context(std::move(context_)), moe(std::move(moe_)) {}
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;
  ~Layer() {
    const nb::gil_scoped_release release;
    moe.reset();
    context.reset();
  }
};

std::unique_ptr<Layer> make_layer(const std::shared_ptr<GuardedContext>& context,
                                  const MoeLayerOptions& options) {
  std::unique_ptr<MoeLayer> moe;
  {
    const nb::gil_scoped_release release;
    const auto lock = context->enter();
    moe = std::make_unique<MoeLayer>(context->context, options);
  }
  return std::make_unique<Layer>(context, std::move(moe));
}

void require_dense(const Array* array) {
  if (array == nullptr || array->is_dense()) return;
  core::fail(ErrorKind::kBadArgument, "{} has gaps; expected a C-contiguous array", array->description());
}

nb::dict to_dict(const MoeSetting& setting) {
  nb::dict dict;
  dict["consumers"] = setting.consumers;
  dict["compute_units"] = setting.compute_units;
  dict["segment_bands"] = setting.segment_bands;
  return dict;
}

nb::dict to_dict(const MoeWaste& waste) {
  nb::dict dict;
  dict["valid_rows"] = waste.valid_rows;
  dict["computed_rows"] = waste.computed_rows;
  dict["wasted_rows"] = waste.wasted_rows();
  dict["bands"] = waste.bands;
  dict["experts"] = waste.experts;
  return dict;
}

nb::dict to_dict(const MoeReport& report) {
  nb::dict dict;
  dict["counts_us"] = report.phases.counts_us;
  dict["gather_us"] = report.phases.gather_us;
  dict["dispatch_us"] = report.phases.dispatch_us;
  dict["activation_us"] = report.phases.activation_us;
  dict["combine_us"] = report.phases.combine_us;
  dict["reduce_us"] = report.phases.reduce_us;
  dict["weights_us"] = report.phases.weights_us;
  dict["total_us"] = report.phases.total_us();
  dict["dispatch_work_us"] = report.dispatch_work_us;
  dict["combine_work_us"] = report.combine_work_us;
  dict["send_rows"] = report.send_rows;
  dict["dropped_rows"] = report.dropped_rows;
  dict["all_dropped_rows"] = report.all_dropped_rows;
  dict["workspace_bytes"] = report.workspace_bytes;
  dict["backlog_us"] = report.backlog_us;
  dict["consumer_idle"] = report.consumer_idle;
  dict["waste"] = to_dict(report.waste);
  dict["setting"] = to_dict(report.setting);
  dict["adaptation"] = report.adaptation;
  dict["method"] = report.method == Method::kSerial ? "serial" : "overlap";
  dict["choice"] = report.choice;
  return dict;
}

void require_place(const Layer& layer, std::initializer_list<const Array*> arrays) {
  for (const Array* array : arrays) require_device(array, layer.context->device);
}

MoeWeights weights_of(const Array& up, const Array& down) {
  require_dense(&up);
  require_dense(&down);
  return {.up = up.data, .down = down.data};
}

nb::dict forward(Layer& self, const Array& x, const MoeRouting& routing, const Array& up, const Array& down,
                 const Array& out, const std::string& method, std::uintptr_t stream, Timeline* timeline) {
  MoeReport report;
  {
    const nb::gil_scoped_release release;
    require_place(self, {&x, &up, &down, &out});
    const auto lock = self.context->enter();
    const RowMajorInput rows(&x);
    report =
        self.moe->forward(rows.data(), rows.row_stride(), routing, weights_of(up, down), out.data,
                          out.row_stride(), parse_method(method), timeline, reinterpret_cast<void*>(stream));
  }
  return to_dict(report);
}

nb::dict backward(Layer& self, const Array& out_gradient, const Array& up, const Array& down,
                  const Array& input, const Array* routing_weights, const Array* up_gradient,
                  const Array* down_gradient, const std::string& method) {
  MoeReport report;
  {
    const nb::gil_scoped_release release;
    require_place(self, {&out_gradient, &up, &down, &input, routing_weights, up_gradient, down_gradient});
    const auto lock = self.context->enter();
    const RowMajorInput rows(&out_gradient);
    const auto floats = [](const Array* array) -> float* {
      require_dense(array);
      if (array == nullptr) return nullptr;
      if (array->dtype != DType::kFloat32) {
        core::fail(ErrorKind::kBadArgument, "{}: gradients of weights are float32", array->description());
      }
      return reinterpret_cast<float*>(array->data);
    };
    const MoeGradients gradients{.input = input.data,
                                 .input_ld = input.row_stride(),
                                 .routing_weights = floats(routing_weights),
                                 .up = floats(up_gradient),
                                 .down = floats(down_gradient)};
    report = self.moe->backward(rows.data(), rows.row_stride(), weights_of(up, down), gradients,
                                parse_method(method), nullptr);
  }
  return to_dict(report);
}

nb::dict measure_parts(Layer& self, const Array& up, const Array& down) {
  MoeLayer::Parts parts;
  {
    const nb::gil_scoped_release release;
    require_place(self, {&up, &down});
    const auto lock = self.context->enter();
    parts = self.moe->measure_parts(weights_of(up, down));
  }
  nb::dict dict;
  dict["dispatch_gemm_us"] = parts.dispatch_gemm_us;
  dict["dispatch_transfer_us"] = parts.dispatch_transfer_us;
  dict["combine_gemm_us"] = parts.combine_gemm_us;
  dict["combine_transfer_us"] = parts.combine_transfer_us;
  return dict;
}

/// An option whose values have names: read by name_of, written by `parse`.
template <auto kMember, auto kParse>
void bind_named(nb::class_<MoeLayerOptions>& options, const char* name) {
  options.def_prop_rw(
      name, [](const MoeLayerOptions& self) { return std::string(name_of(self.*kMember)); },
      [](MoeLayerOptions& self, const std::string& value) { self.*kMember = kParse(value); });
}

void bind_options(nb::module_& module) {
  using Control = MoeControllerOptions;
  nb::class_<Control>(module, "MoeControllerOptions")
      .def(nb::init<>())
      .def_rw("min_consumers", &Control::min_consumers)
      .def_rw("max_consumers", &Control::max_consumers)
      .def_rw("min_segment_bands", &Control::min_segment_bands)
      .def_rw("max_segment_bands", &Control::max_segment_bands)
      .def_rw("total_units", &Control::total_units)
      .def_rw("high_backlog", &Control::high_backlog)
      .def_rw("high_idle", &Control::high_idle)
      .def_rw("patience", &Control::patience);
  using Options = MoeLayerOptions;
  nb::class_<Options> options(module, "MoeLayerOptions");
  options.def(nb::init<>())
      .def_rw("hidden", &Options::hidden)
      .def_rw("intermediate", &Options::intermediate)
      .def_rw("num_experts", &Options::num_experts)
      .def_rw("gated", &Options::gated)
      .def_rw("tile_m", &Options::tile_m)
      .def_rw("tile_n", &Options::tile_n)
      .def_rw("segment_bands", &Options::segment_bands)
      .def_rw("consumers", &Options::consumers)
      .def_rw("collective_groups", &Options::collective_groups)
      .def_rw("capacity", &Options::capacity)
      .def_rw("adapt", &Options::adapt)
      .def_rw("controller", &Options::controller)
      .def_rw("poison_workspace", &Options::poison_workspace)
      .def(
          "set_machine",
          [](Options& self, const std::string& json) {
            self.machine = std::make_shared<const MachineProfile>(parse_machine_profile(json, "machine"));
          },
          nb::arg("json"));
  bind_named<&Options::dtype, parse_dtype>(options, "dtype");
  bind_named<&Options::activation, parse_activation>(options, "activation");
  bind_named<&Options::padding, parse_moe_padding>(options, "padding");
  bind_named<&Options::order, parse_moe_order>(options, "order");
  bind_named<&Options::transport, parse_moe_transport>(options, "transport");
  bind_named<&Options::overlap_if, parse_moe_overlap_if>(options, "overlap_if");
}

GateOptions gate_options(const std::string& function, std::int32_t top_k, bool renormalise) {
  GateOptions options;
  options.top_k = top_k;
  options.renormalise = renormalise;
  if (function == name_of(GateFunction::kSigmoid)) {
    options.function = GateFunction::kSigmoid;
  } else if (function != name_of(GateFunction::kSoftmax)) {
    core::fail(ErrorKind::kBadArgument, "gate '{}' is not accepted; expected softmax or sigmoid", function);
  }
  return options;
}

MoeRouting route(const Array& logits, const std::string& function, std::int32_t top_k, bool renormalise) {
  const RowMajorInput rows(&logits);
  return route_tokens(rows.data(), rows.row_stride(), logits.shape[0], logits.shape[1], logits.dtype,
                      gate_options(function, top_k, renormalise));
}

std::vector<float> gradient_of_logits(const Array& logits, const std::string& function, bool renormalise,
                                      const MoeRouting& routing, const std::vector<float>& weight_gradient) {
  const RowMajorInput rows(&logits);
  return route_gradient(rows.data(), rows.row_stride(), logits.dtype,
                        gate_options(function, routing.top_k, renormalise), routing, weight_gradient);
}

}  // namespace

void bind_moe(nb::module_& module) {
  bind_options(module);
  nb::class_<MoeRouting>(module, "MoeRouting")
      .def(
          "__init__",
          [](MoeRouting* self, std::int64_t tokens, std::int64_t num_experts, std::int32_t top_k,
             std::vector<std::int32_t> experts, std::vector<float> weights) {
            new (self) MoeRouting{tokens, num_experts, top_k, std::move(experts), std::move(weights)};
          },
          nb::arg("tokens"), nb::arg("num_experts"), nb::arg("top_k"), nb::arg("experts"), nb::arg("weights"))
      .def("check", [](const MoeRouting& self) { check_routing(self); })
      .def_ro("tokens", &MoeRouting::tokens)
      .def_ro("num_experts", &MoeRouting::num_experts)
      .def_ro("top_k", &MoeRouting::top_k)
      .def_ro("experts", &MoeRouting::experts)
      .def_ro("weights", &MoeRouting::weights);
  nb::class_<Layer>(module, "MoeLayer")
      .def("forward", forward, nb::arg("x"), nb::arg("routing"), nb::arg("up"), nb::arg("down"),
           nb::arg("out"), nb::arg("method"), nb::arg("stream"), nb::arg("timeline").none())
      .def("backward", backward, nb::arg("out_gradient"), nb::arg("up"), nb::arg("down"), nb::arg("input"),
           nb::arg("routing_weights").none(), nb::arg("up_gradient").none(), nb::arg("down_gradient").none(),
           nb::arg("method"))
      .def("measure_parts", measure_parts, nb::arg("up"), nb::arg("down"))
      .def("plans_json",
           [](const Layer& self) {
             return std::vector{to_json(self.moe->dispatch_plan()), to_json(self.moe->combine_plan())};
           })
      .def_prop_ro("setting", [](const Layer& self) { return to_dict(self.moe->setting()); })
      .def(
          "set_adaptive", [](Layer& self, bool adapt) { self.moe->set_adaptive(adapt); }, nb::arg("adapt"))
      .def_prop_ro("first_expert", [](const Layer& self) { return self.moe->first_expert(); })
      .def_prop_ro("local_experts", [](const Layer& self) { return self.moe->local_experts(); });
  module.def("make_moe_layer", make_layer, nb::arg("context"), nb::arg("options"));
  module.def("route_tokens", route, nb::arg("logits"), nb::arg("function"), nb::arg("top_k"),
             nb::arg("renormalise"));
  module.def("route_gradient", gradient_of_logits, nb::arg("logits"), nb::arg("function"),
             nb::arg("renormalise"), nb::arg("routing"), nb::arg("weight_gradient"));
}

}  // namespace flashoverlap::python

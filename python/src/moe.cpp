#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

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

std::unique_ptr<Layer> make_layer(const std::shared_ptr<GuardedContext>& context, std::int64_t hidden,
                                  std::int64_t intermediate, std::int64_t num_experts,
                                  const std::string& dtype, bool gated, const std::string& activation,
                                  std::int64_t capacity, const std::string& padding, const std::string& order,
                                  const std::string& transport, const std::vector<std::int64_t>& tile,
                                  bool poison_workspace) {
  MoeLayerOptions options;
  options.hidden = hidden;
  options.intermediate = intermediate;
  options.num_experts = num_experts;
  options.dtype = parse_dtype(dtype);
  options.gated = gated;
  options.activation = parse_activation(activation);
  options.capacity = capacity;
  options.padding = parse_moe_padding(padding);
  options.order = parse_moe_order(order);
  options.transport = parse_moe_transport(transport);
  if (tile.size() >= 2) {
    options.tile_m = tile[0];
    options.tile_n = tile[1];
  }
  options.poison_workspace = poison_workspace;
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
  dict["send_rows"] = report.send_rows;
  dict["dropped_rows"] = report.dropped_rows;
  dict["all_dropped_rows"] = report.all_dropped_rows;
  dict["workspace_bytes"] = report.workspace_bytes;
  dict["backlog_us"] = report.backlog_us;
  dict["consumer_idle"] = report.consumer_idle;
  return dict;
}

MoeWeights weights_of(const Array& up, const Array& down) {
  require_dense(&up);
  require_dense(&down);
  return {.up = up.data, .down = down.data};
}

nb::dict forward(Layer& self, const Array& x, const MoeRouting& routing, const Array& up, const Array& down,
                 const Array& out, const std::string& method, Timeline* timeline) {
  MoeReport report;
  {
    const nb::gil_scoped_release release;
    const auto lock = self.context->enter();
    const RowMajorInput rows(&x);
    report = self.moe->forward(rows.data(), rows.row_stride(), routing, weights_of(up, down), out.data,
                               out.row_stride(), parse_method(method), timeline);
  }
  return to_dict(report);
}

nb::dict backward(Layer& self, const Array& out_gradient, const Array& up, const Array& down,
                  const Array& input, const Array* routing_weights, const Array* up_gradient,
                  const Array* down_gradient, const std::string& method) {
  MoeReport report;
  {
    const nb::gil_scoped_release release;
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
           nb::arg("out"), nb::arg("method"), nb::arg("timeline").none())
      .def("backward", backward, nb::arg("out_gradient"), nb::arg("up"), nb::arg("down"), nb::arg("input"),
           nb::arg("routing_weights").none(), nb::arg("up_gradient").none(), nb::arg("down_gradient").none(),
           nb::arg("method"))
      .def_prop_ro("first_expert", [](const Layer& self) { return self.moe->first_expert(); })
      .def_prop_ro("local_experts", [](const Layer& self) { return self.moe->local_experts(); });
  module.def("make_moe_layer", make_layer, nb::arg("context"), nb::arg("hidden"), nb::arg("intermediate"),
             nb::arg("num_experts"), nb::arg("dtype"), nb::arg("gated"), nb::arg("activation"),
             nb::arg("capacity"), nb::arg("padding"), nb::arg("order"), nb::arg("transport"), nb::arg("tile"),
             nb::arg("poison_workspace"));
  module.def("route_tokens", route, nb::arg("logits"), nb::arg("function"), nb::arg("top_k"),
             nb::arg("renormalise"));
  module.def("route_gradient", gradient_of_logits, nb::arg("logits"), nb::arg("function"),
             nb::arg("renormalise"), nb::arg("routing"), nb::arg("weight_gradient"));
}

}  // namespace flashoverlap::python

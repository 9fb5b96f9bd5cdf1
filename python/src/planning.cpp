#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/fail.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/machine_profile.h"
#include "flashoverlap/operators.h"
#include "flashoverlap/plan.h"
#include "names.h"
#include "operator_factory.h"
#include "problem.h"

namespace flashoverlap::python {
namespace {

Method method_of(const Problem& problem) {
  if (problem.method == "serial") return Method::kSerial;
  return problem.method == "sliced" ? Method::kSliced : Method::kOverlap;
}

MadeOperator make_operator(Context& context, const Problem& problem, std::size_t rank) {
  const bool routed = !problem.destinations.empty();
  const std::int64_t m = routed ? std::ssize(problem.destinations[rank]) : problem.m;
  const bool named = problem.method == "signal" || problem.method == "tail-free";
  return make_gemm_operator(
      context, problem.operation,
      gemm_options(m, problem.n, problem.k, problem.dtype, problem.tile, problem.partition),
      {.rows = parse_rows(problem.rows),
       .overlap = named ? parse_overlap(problem.method) : OverlapMethod::kAuto,
       .destinations = routed ? problem.destinations[rank] : std::vector<std::int32_t>{},
       .slices = problem.slices,
       .baseline = {.num_slices = problem.num_slices}});
}

/// The plans that the operators themselves make, of all ranks, verified together.
std::vector<std::string> make_plans(const Problem& problem) {
  constexpr std::int64_t kMostRanks = 1024;
  check_world_size(problem, kMostRanks);
  std::vector<OverlapPlan> plans(static_cast<std::size_t>(problem.world_size));
  ContextOptions context_options;
  context_options.num_threads = static_cast<int>(problem.units);
  run_ranks(static_cast<int>(problem.world_size), {}, [&](std::shared_ptr<Communicator> communicator) {
    const auto rank = static_cast<std::size_t>(communicator->rank());
    Context context(std::move(communicator), context_options);
    plans[rank] = make_operator(context, problem, rank).gemm->plan(method_of(problem));
  });
  if (const Verdict verdict = verify(plans); !verdict) core::fail(ErrorKind::kInternal, "{}", verdict.reason);
  std::vector<std::string> json;
  for (const OverlapPlan& plan : plans) json.push_back(to_json(plan));
  return json;
}

std::vector<OverlapPlan> read_plans(const std::vector<std::string>& json) {
  std::vector<OverlapPlan> plans;
  for (const std::string& one : json) plans.push_back(plan_from_json(one));
  return plans;
}

void bind_problem(nb::module_& module) {
  nb::class_<Problem>(module, "Problem")
      .def(nb::init<>())
      .def_rw("operation", &Problem::operation)
      .def_rw("m", &Problem::m)
      .def_rw("n", &Problem::n)
      .def_rw("k", &Problem::k)
      .def_rw("world_size", &Problem::world_size)
      .def_rw("dtype", &Problem::dtype)
      .def_rw("rows", &Problem::rows)
      .def_rw("method", &Problem::method)
      .def_rw("tile", &Problem::tile)
      .def_rw("partition", &Problem::partition)
      .def_rw("destinations", &Problem::destinations)
      .def_rw("num_slices", &Problem::num_slices)
      .def_rw("units", &Problem::units)
      .def(
          "set_slices",
          [](Problem& self, const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& columns,
             std::int64_t parts,
             std::int64_t send_channels) { self.slices = slices_of(rows, columns, parts, send_channels); },
          nb::arg("rows"), nb::arg("columns"), nb::arg("parts"), nb::arg("send_channels"));
}

}  // namespace

void bind_planning(nb::module_& module) {
  bind_problem(module);
  module.def("make_plans", make_plans, nb::arg("problem"), nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "plan_text", [](const std::string& json) { return to_text(plan_from_json(json)); }, nb::arg("json"));
  module.def(
      "verify_plans", [](const std::vector<std::string>& json) { return verify(read_plans(json)).reason; },
      nb::arg("json"));
  module.def("shipped_machine_profiles", shipped_machine_profiles);
  module.def(
      "load_machine_profile", [](const std::string& name) { return to_json(load_machine_profile(name)); },
      nb::arg("name_or_path"));
  module.def(
      "parse_machine_profile",
      [](const std::string& json) { return to_json(parse_machine_profile(json, "the profile")); },
      nb::arg("json"));
  module.def(
      "curve_points",
      [](const std::string& machine_json, const std::string& operation, std::int64_t world_size,
         std::int64_t units, const std::string& dtype, const std::vector<std::int64_t>& sizes) {
        const MachineProfile machine = parse_machine_profile(machine_json, "machine");
        const BandwidthCurve curve =
            machine.curve(parse_collective(operation), world_size, units, parse_dtype(dtype));
        std::vector<double> times;
        for (const std::int64_t bytes : sizes) times.push_back(curve.time_us(bytes));
        return times;
      },
      nb::arg("machine"), nb::arg("operation"), nb::arg("world_size"), nb::arg("units"), nb::arg("dtype"),
      nb::arg("sizes"));
  module.def(
      "communication_unit_choices",
      [](const std::string& machine_json, const std::string& operation, std::int64_t world_size) {
        return parse_machine_profile(machine_json, "machine")
            .communication_unit_choices(parse_collective(operation), world_size);
      },
      nb::arg("machine"), nb::arg("operation"), nb::arg("world_size"));
}

}  // namespace flashoverlap::python

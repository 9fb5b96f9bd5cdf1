#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/fail.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/machine_profile.h"
#include "flashoverlap/operators.h"
#include "flashoverlap/partition_search.h"
#include "flashoverlap/plan.h"
#include "flashoverlap/simulator.h"
#include "flashoverlap/timeline.h"
#include "flashoverlap/tuner.h"
#include "names.h"

namespace flashoverlap::python {
namespace {

/// A call on paper: nothing of it is run.
struct Problem {
  std::string operation;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t world_size = 2;
  std::string dtype = "f32";
  std::string rows = "contiguous";
  std::vector<std::int64_t> tile;                       ///< tile_m, tile_n, swizzle; fewer or 0: chosen.
  std::vector<std::int64_t> partition;                  ///< Empty: chosen.
  std::vector<std::vector<std::int32_t>> destinations;  ///< All-to-all: of each rank.
  std::int64_t units = 0;                               ///< Of one rank; 0: chosen.
};

std::int64_t item_or_zero(const std::vector<std::int64_t>& list, std::size_t index) {
  return index < list.size() ? list[index] : 0;
}

void check_world_size(const Problem& problem, std::int64_t most) {
  if (problem.world_size < 1 || problem.world_size > most) {
    core::fail(ErrorKind::kBadArgument, "world_size is {}; expected 1 to {}", problem.world_size, most);
  }
  if (problem.operation == "gemm-all-to-all" && std::ssize(problem.destinations) != problem.world_size) {
    core::fail(ErrorKind::kBadArgument, "destinations has {} lists; expected one for each of {} ranks",
               problem.destinations.size(), problem.world_size);
  }
}

std::unique_ptr<GemmOperator> make_operator(Context& context, const Problem& problem, std::size_t rank) {
  GemmOptions options{.m = problem.m,
                      .n = problem.n,
                      .k = problem.k,
                      .dtype = parse_dtype(problem.dtype),
                      .tile_m = item_or_zero(problem.tile, 0),
                      .tile_n = item_or_zero(problem.tile, 1),
                      .swizzle = item_or_zero(problem.tile, 2),
                      .partition = problem.partition};
  switch (parse_collective(problem.operation)) {
    case TransferKind::kReduceScatter:
      return std::make_unique<GemmReduceScatter>(context, options, parse_rows(problem.rows));
    case TransferKind::kAllToAll:
      options.m = std::ssize(problem.destinations[rank]);
      return std::make_unique<GemmAllToAll>(context, options, problem.destinations[rank]);
    default:
      return std::make_unique<GemmAllReduce>(context, options);
  }
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
    plans[rank] = make_operator(context, problem, rank)->plan();
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

TuneRequest tune_request(const Problem& problem, const MachineProfile& machine) {
  constexpr std::int64_t kMostRanks = 1 << 20;
  check_world_size(problem, kMostRanks);
  TuneRequest request;
  request.collective = parse_collective(problem.operation);
  request.world_size = problem.world_size;
  request.m = problem.m;
  request.n = problem.n;
  request.k = problem.k;
  request.dtype = parse_dtype(problem.dtype);
  request.rows = parse_rows(problem.rows);
  request.routing.destinations = problem.destinations;
  request.units = problem.units;
  const TileShape asked{item_or_zero(problem.tile, 0), item_or_zero(problem.tile, 1),
                        std::max<std::int64_t>(1, item_or_zero(problem.tile, 2))};
  if (asked.tile_m > 0 && asked.tile_n > 0) {
    request.tiles = {asked};
  } else if (asked.swizzle != 1) {
    for (const GemmKernel& kernel : machine.gemm.kernels) {
      if (kernel.dtype == request.dtype)
        request.tiles.push_back({kernel.tile_m, kernel.tile_n, asked.swizzle});
    }
  }
  return request;
}

/// The tuner's best, with the partition that was asked for in place of its own.
TuneResult tuned(const Problem& problem, const TuneRequest& request, const MachineProfile& machine) {
  TuneResult result = tune_call(request, machine);
  if (problem.partition.empty()) return result;
  TuneChoice& best = result.best;
  best.partition = problem.partition;
  const std::int64_t communicating = best.resources.communication_units;
  const std::int64_t units = request.units == 0 ? machine.units : request.units;
  best.resources = {communicating < units ? units - communicating : units, communicating};
  TuneChoice finest = best;
  finest.partition.assign(static_cast<std::size_t>(std::accumulate(problem.partition.begin(),
                                                                   problem.partition.end(), std::int64_t{0})),
                          1);
  const OverlapCost cost = overlap_cost(plans_for(request, finest), machine);
  best.prediction = predict(cost, problem.partition);
  best.lower_bound_us = lower_bound_us(cost);
  return result;
}

nb::dict to_dict(const TuneChoice& choice) {
  nb::dict dict;
  dict["tile"] = nb::make_tuple(choice.tile.tile_m, choice.tile.tile_n);
  dict["swizzle"] = choice.tile.swizzle;
  dict["compute_units"] = choice.resources.compute_units;
  dict["communication_units"] = choice.resources.communication_units;
  dict["partition"] = nb::cast(choice.partition);
  dict["total_us"] = choice.prediction.total_us;
  dict["compute_us"] = choice.prediction.compute_us;
  dict["communication_us"] = choice.prediction.communication_us;
  dict["exposed_us"] = choice.prediction.exposed_us;
  dict["lower_bound_us"] = choice.lower_bound_us;
  nb::list groups;
  for (const GroupTimes& group : choice.prediction.groups) {
    nb::dict item;
    item["waves"] = group.waves;
    item["bytes"] = group.bytes;
    item["ready_us"] = group.ready_us;
    item["begin_us"] = group.begin_us;
    item["end_us"] = group.end_us;
    groups.append(item);
  }
  dict["groups"] = groups;
  return dict;
}

nb::dict tune(const Problem& problem, const std::string& machine_json) {
  TuneResult result;
  {
    const nb::gil_scoped_release release;
    const MachineProfile machine = parse_machine_profile(machine_json, "machine");
    result = tuned(problem, tune_request(problem, machine), machine);
  }
  nb::dict dict;
  dict["best"] = to_dict(result.best);
  dict["serial"] = to_dict(result.serial);
  nb::list candidates;
  for (const TuneChoice& choice : result.candidates) candidates.append(to_dict(choice));
  dict["candidates"] = candidates;
  dict["num_priced"] = result.num_priced;
  dict["explanation"] = explain(result);
  return dict;
}

nb::dict to_dict(const SimulationResult& result) {
  nb::dict dict;
  dict["total_us"] = result.total_us;
  dict["num_events"] = result.num_events;
  dict["critical_path"] = nb::cast(result.critical_path);
  nb::list ranks;
  for (const RankSimulation& rank : result.ranks) {
    nb::dict item;
    item["finish_us"] = rank.finish_us;
    item["compute_us"] = rank.compute_us;
    item["exposed_us"] = rank.exposed_us;
    item["communicating_us"] = rank.communicating_us;
    item["idle_fraction"] = rank.idle_fraction;
    item["sent_bytes"] = rank.sent_bytes;
    item["received_bytes"] = rank.received_bytes;
    ranks.append(item);
  }
  dict["ranks"] = ranks;
  return dict;
}

SimulationResult simulate_choice(const TuneRequest& request, const TuneChoice& choice,
                                 const MachineProfile& machine, const SimulationOptions& options) {
  const std::vector<OverlapPlan> plans = plans_for(request, choice);
  return plans.size() == 1 ? simulate_symmetric(plans[0], machine, options)
                           : simulate(plans, machine, options);
}

nb::tuple simulate_problem(const Problem& problem, const std::string& machine_json, double jitter,
                           std::uint64_t seed, const std::vector<std::pair<std::int64_t, double>>& slow_ranks,
                           std::int64_t timeline_ranks) {
  SimulationResult overlap;
  SimulationResult serial;
  TuneResult choice;
  {
    const nb::gil_scoped_release release;
    const MachineProfile machine = parse_machine_profile(machine_json, "machine");
    const TuneRequest request = tune_request(problem, machine);
    choice = tuned(problem, request, machine);
    SimulationOptions options;
    options.jitter = jitter;
    options.seed = seed;
    options.slow_ranks = slow_ranks;
    options.timeline_ranks = timeline_ranks;
    overlap = simulate_choice(request, choice.best, machine, options);
    options.timeline_ranks = 0;
    serial = simulate_choice(request, choice.serial, machine, options);
  }
  return nb::make_tuple(to_dict(overlap), to_dict(serial), to_dict(choice.best), overlap.timeline);
}

std::string_view name_of_kind(SpanKind kind) {
  switch (kind) {
    case SpanKind::kCompute:
      return "compute";
    case SpanKind::kCommunication:
      return "communication";
    case SpanKind::kWait:
      return "wait";
    case SpanKind::kEpilogue:
      return "epilogue";
  }
  return "";
}

nb::list spans(const Timeline& timeline) {
  nb::list list;
  for (const Span& span : timeline.spans) {
    nb::dict item;
    item["rank"] = span.rank;
    item["track"] = span.track;
    item["name"] = span.name;
    item["kind"] = std::string(name_of_kind(span.kind));
    item["begin_us"] = span.begin_us;
    item["end_us"] = span.end_us;
    list.append(item);
  }
  return list;
}

void bind_timeline(nb::module_& module) {
  nb::class_<Timeline>(module, "Timeline", "What ran where and when. Times in microseconds.")
      .def(nb::init<>())
      .def_prop_ro("spans", spans, "One dict per span: rank, track, name, kind, begin_us, end_us.")
      .def(
          "to_text", [](const Timeline& self, int width) { return to_text(self, width); },
          nb::arg("width") = 100, "A picture for the terminal, one line per rank and track.")
      .def(
          "to_chrome_trace",
          [](const Timeline& self) {
            std::ostringstream out;
            write_chrome_trace(self, out);
            return out.str();
          },
          "Chrome and Perfetto trace events, as JSON text.")
      .def("__len__", [](const Timeline& self) { return self.spans.size(); })
      .def("__str__", [](const Timeline& self) { return to_text(self, 100); });
}

}  // namespace

void bind_planning(nb::module_& module) {
  bind_timeline(module);
  nb::class_<Problem>(module, "Problem")
      .def(
          "__init__",
          [](Problem* self, const std::string& operation, std::int64_t m, std::int64_t n, std::int64_t k,
             std::int64_t world_size, const std::string& dtype, const std::string& rows,
             const std::vector<std::int64_t>& tile, const std::vector<std::int64_t>& partition,
             const std::vector<std::vector<std::int32_t>>& destinations, std::int64_t units) {
            new (self)
                Problem{operation, m, n, k, world_size, dtype, rows, tile, partition, destinations, units};
          },
          nb::arg("operation"), nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("world_size"),
          nb::arg("dtype"), nb::arg("rows"), nb::arg("tile"), nb::arg("partition"), nb::arg("destinations"),
          nb::arg("units"));
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
  module.def("tune", tune, nb::arg("problem"), nb::arg("machine"));
  module.def("simulate", simulate_problem, nb::arg("problem"), nb::arg("machine"), nb::arg("jitter"),
             nb::arg("seed"), nb::arg("slow_ranks"), nb::arg("timeline_ranks"));
}

}  // namespace flashoverlap::python

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "flashoverlap/machine_profile.h"
#include "flashoverlap/simulator.h"
#include "flashoverlap/timeline.h"
#include "flashoverlap/tuner.h"
#include "problem.h"

/// What calls take on a machine: by the closed form, and simulated.
namespace flashoverlap::python {
namespace {

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
    item["alone_us"] = rank.alone_us;
    item["exposed_communication_us"] = rank.exposed_communication_us;
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

struct Simulated {
  SimulationResult overlap;
  SimulationResult serial;
  std::optional<SimulationResult> sliced;
  std::optional<TuneChoice> choice;  ///< Of wave groups.
};

Simulated simulate_groups(const Problem& problem, const MachineProfile& machine, SimulationOptions options) {
  const TuneRequest request = tune_request(problem, machine);
  const TuneResult choice = tuned(problem, request, machine);
  Simulated simulated;
  simulated.overlap = simulate_choice(request, choice.best, machine, options);
  options.timeline_ranks = 0;
  simulated.serial = simulate_choice(request, choice.serial, machine, options);
  simulated.choice = choice.best;
  return simulated;
}

Simulated simulate_slices(const Problem& problem, const MachineProfile& machine, SimulationOptions options) {
  const auto run = [&](plan::SlicedPlan which) {
    const std::vector<OverlapPlan> plans = sliced_plans(problem, machine, which);
    return simulate(std::span<const OverlapPlan>(plans), machine, options);
  };
  Simulated simulated;
  simulated.overlap = run(plan::SlicedPlan::kTailFree);
  options.timeline_ranks = 0;
  simulated.serial = run(plan::SlicedPlan::kSerial);
  if (problem.num_slices > 0) simulated.sliced = run(plan::SlicedPlan::kSliced);
  return simulated;
}

nb::dict simulate_problem(const Problem& problem, const std::string& machine_json, double jitter,
                          std::uint64_t seed, const std::vector<std::pair<std::int64_t, double>>& slow_ranks,
                          std::int64_t timeline_ranks) {
  Simulated simulated;
  {
    const nb::gil_scoped_release release;
    const MachineProfile machine = parse_machine_profile(machine_json, "machine");
    SimulationOptions options;
    options.jitter = jitter;
    options.seed = seed;
    options.slow_ranks = slow_ranks;
    options.timeline_ranks = timeline_ranks;
    simulated = sliced_op(problem) ? simulate_slices(problem, machine, options)
                                   : simulate_groups(problem, machine, options);
  }
  nb::dict dict;
  dict["overlap"] = to_dict(simulated.overlap);
  dict["serial_us"] = simulated.serial.total_us;
  dict["sliced_us"] = simulated.sliced ? nb::cast(simulated.sliced->total_us) : nb::none();
  dict["choice"] = simulated.choice ? nb::object(to_dict(*simulated.choice)) : nb::none();
  dict["timeline"] = simulated.overlap.timeline;
  return dict;
}

nb::dict parts_of_slices(const Problem& problem, const std::string& machine_json) {
  PartsChoice choice;
  {
    const nb::gil_scoped_release release;
    choice = choose_parts(problem, parse_machine_profile(machine_json, "machine"));
  }
  nb::list candidates;
  for (const PartsCandidate& candidate : choice.candidates) {
    candidates.append(nb::make_tuple(candidate.cut.parts, candidate.cut.send_channels, candidate.total_us));
  }
  nb::dict dict;
  dict["parts"] = choice.cut.parts;
  dict["send_channels"] = choice.cut.send_channels;
  dict["candidates"] = candidates;
  dict["reason"] = choice.reason;
  return dict;
}

}  // namespace

void bind_pricing(nb::module_& module) {
  module.def("tune", tune, nb::arg("problem"), nb::arg("machine"));
  module.def("simulate", simulate_problem, nb::arg("problem"), nb::arg("machine"), nb::arg("jitter"),
             nb::arg("seed"), nb::arg("slow_ranks"), nb::arg("timeline_ranks"));
  module.def("choose_parts", parts_of_slices, nb::arg("problem"), nb::arg("machine"));
}

}  // namespace flashoverlap::python

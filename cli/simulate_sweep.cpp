#include "simulate_sweep.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "flashoverlap/partition_search.h"
#include "format.h"
#include "option_values.h"
#include "plan/sliced_call.h"
#include "tune_request.h"

namespace flashoverlap::cli {
namespace {

using plan::SlicedPlan;

SimulationResult simulate_choice(const TuneRequest& request, const TuneChoice& choice,
                                 const MachineProfile& machine, const SimulationOptions& options) {
  const std::vector<OverlapPlan> plans = plans_for(request, choice);
  return plans.size() == 1 ? simulate_symmetric(plans[0], machine, options)
                           : simulate(plans, machine, options);
}

/// The partition that was asked for in place of the tuner's, with the tile and units of the tuner's best.
void take_given_partition(const TuneRequest& request, const MachineProfile& machine,
                          const std::vector<std::int64_t>& partition, TuneResult& tuned) {
  TuneChoice& best = tuned.best;
  best.partition = partition;
  const std::int64_t communicating = best.resources.communication_units;
  const std::int64_t units = request.units == 0 ? machine.units : request.units;
  best.resources = {machine.gemm.compute_units(request.dtype, best.tile.tile_m, best.tile.tile_n,
                                               communicating < units ? units - communicating : units),
                    communicating};
  TuneChoice finest = best;
  finest.partition.assign(
      static_cast<std::size_t>(std::accumulate(partition.begin(), partition.end(), std::int64_t{0})), 1);
  const OverlapCost cost = overlap_cost(plans_for(request, finest), machine);
  best.prediction = predict(cost, partition);
  best.lower_bound_us = lower_bound_us(cost);
}

/// One rank's plan with the tile and units of `choice`.
OverlapPlan plan_in_slices(const ProblemOptions& problem, const TuneChoice& choice, SlicedPlan which,
                           std::int32_t rank) {
  PlanOptions options{.rank = rank,
                      .world_size = static_cast<std::int32_t>(problem.ranks),
                      .dtype = problem.dtype,
                      .m = problem.m,
                      .n = problem.n,
                      .k = problem.k,
                      .tile_m = choice.tile.tile_m,
                      .tile_n = choice.tile.tile_n,
                      .swizzle = choice.tile.swizzle,
                      .resources = choice.resources,
                      .partition = {}};
  if (which == SlicedPlan::kTailFree) options.partition = problem.partition;  // refused where there is one
  return plan::plan_sliced_call({.op = plan::SlicedOp::kReduceScatter,
                                 .slices = {.rows = problem.slices, .columns = {}},
                                 .num_slices = std::max<std::int64_t>(1, problem.baseline_slices)},
                                options, which);
}

std::vector<OverlapPlan> plans_in_slices(const ProblemOptions& problem, const TuneChoice& choice,
                                         SlicedPlan which) {
  std::vector<OverlapPlan> plans;
  for (std::int32_t rank = 0; rank < problem.ranks; ++rank)
    plans.push_back(plan_in_slices(problem, choice, which, rank));
  return plans;
}

/// On all units, with the tile that is best without overlap: direct transfers take none.
PartsRequest parts_request(const ProblemOptions& problem, const TuneChoice& choice) {
  return {.operation = std::string(name_of(problem.op)),
          .world_size = static_cast<std::int32_t>(problem.ranks),
          .plan =
              [&problem, &choice](std::int32_t rank, const SliceCut& cut) {
                ProblemOptions of_rank = problem;
                of_rank.slices.parts = cut.parts;
                of_rank.slices.send_channels = cut.send_channels;
                return plan_in_slices(of_rank, choice, SlicedPlan::kTailFree, rank);
              },
          .given = {.parts = problem.slices.parts, .send_channels = problem.slices.send_channels}};
}

/// As GemmReduceScatter takes kAuto. Nothing for another method.
void choose_way(const SimulateOptions& options, const TuneRequest& request, const MachineProfile& machine,
                SimulatedCall& call) {
  constexpr std::int64_t kMostRanks = 64;
  const ProblemOptions& problem = options.problem;
  if (problem.method == OverlapMethod::kTailFree) call.way = OverlapWay::kTailFree;
  if (problem.method != OverlapMethod::kAuto || !problem.partition.empty() || problem.ranks > kMostRanks) {
    return;
  }
  const auto plans_of = [&](const TuneChoice& choice) {
    return [plans = plans_for(request, choice)](std::int32_t rank) {
      return plans[plans.size() == 1 ? 0 : static_cast<std::size_t>(rank)];
    };
  };
  const OverlapChoice choice = choose_overlap({.tail_free = parts_request(problem, call.tuned.serial),
                                               .signal = plans_of(call.tuned.best),
                                               .serial = plans_of(call.tuned.serial)},
                                              machine);
  call.way = choice.way;
  call.way_reason = choice.reason;
  if (choice.way == OverlapWay::kTailFree) call.parts = choice.parts;
  if (choice.way == OverlapWay::kSerial) call.tuned.best = call.tuned.serial;
}

void simulate_tail_free(const SimulateOptions& options, const MachineProfile& machine, SimulatedCall& call) {
  call.tuned.best = call.tuned.serial;
  const TuneChoice& choice = call.tuned.best;
  ProblemOptions problem = options.problem;
  if (!call.parts) call.parts = choose_parts(parts_request(problem, choice), machine);
  problem.slices.parts = call.parts->cut.parts;
  problem.slices.send_channels = call.parts->cut.send_channels;
  call.overlap =
      simulate(plans_in_slices(problem, choice, SlicedPlan::kTailFree), machine, options.simulation);
  SimulationOptions without_timeline = options.simulation;
  without_timeline.timeline_ranks = 0;
  call.serial = simulate(plans_in_slices(problem, choice, SlicedPlan::kSerial), machine, without_timeline);
}

double speedup(const SimulatedCall& call) {
  return call.overlap.total_us > 0 ? call.serial.total_us / call.overlap.total_us : 1;
}

}  // namespace

double exposed_us(const SimulationResult& result) {
  double most = 0;
  for (const RankSimulation& rank : result.ranks) most = std::max(most, rank.exposed_communication_us);
  return most;
}

double exposed_share(const SimulatedCall& call, const SimulationResult& result) {
  double communicating_us = 0;
  for (const RankSimulation& rank : call.serial.ranks)
    communicating_us = std::max(communicating_us, rank.communicating_us);
  return communicating_us > 0 ? exposed_us(result) / communicating_us : 0;
}

SimulatedCall simulate_call(const SimulateOptions& options, const MachineProfile& machine) {
  const TuneRequest request = tune_request(options.problem, machine, options.units);
  SimulatedCall call;
  call.tuned = tune_call(request, machine);
  if (!options.problem.partition.empty())
    take_given_partition(request, machine, options.problem.partition, call.tuned);
  SimulationOptions without_timeline = options.simulation;
  without_timeline.timeline_ranks = 0;
  choose_way(options, request, machine, call);
  if (call.way == OverlapWay::kTailFree) {
    simulate_tail_free(options, machine, call);
  } else {
    call.overlap = simulate_choice(request, call.tuned.best, machine, options.simulation);
    call.serial = simulate_choice(request, call.tuned.serial, machine, without_timeline);
  }
  if (options.problem.has_sliced()) {
    call.sliced = simulate(plans_in_slices(options.problem, call.tuned.best, SlicedPlan::kSliced), machine,
                           without_timeline);
  }
  return call;
}

namespace {

/// What the JSON has besides with --method.
void add_exposed(const SimulatedCall& call, nlohmann::ordered_json& json) {
  json["method"] = name_of(call.way);
  if (!call.way_reason.empty()) json["method_reason"] = call.way_reason;
  if (call.parts) {
    json["parts"] = call.parts->cut.parts;
    json["send_channels"] = call.parts->cut.send_channels;
    json.erase("predicted_us");  // of signals
  }
  json["exposed_us"] = exposed_us(call.overlap);
  json["exposed_share"] = exposed_share(call, call.overlap);
  json["serial_exposed_share"] = exposed_share(call, call.serial);
  if (!call.sliced) return;
  json["sliced_us"] = call.sliced->total_us;
  json["sliced_exposed_share"] = exposed_share(call, *call.sliced);
}

}  // namespace

nlohmann::ordered_json simulated_json(const SimulateOptions& options, const MachineProfile& machine,
                                      const SimulatedCall& call) {
  const ProblemOptions& p = options.problem;
  const TuneChoice& choice = call.tuned.best;
  nlohmann::ordered_json json{{"simulated", true},
                              {"machine", machine.name},
                              {"op", name_of(p.op)},
                              {"ranks", p.ranks},
                              {"m", p.m},
                              {"n", p.n},
                              {"k", p.k},
                              {"dtype", name_of(p.dtype)},
                              {"tile_m", choice.tile.tile_m},
                              {"tile_n", choice.tile.tile_n},
                              {"compute_units", choice.resources.compute_units},
                              {"communication_units", choice.resources.communication_units},
                              {"partition", choice.partition},
                              {"serial_us", call.serial.total_us},
                              {"overlap_us", call.overlap.total_us},
                              {"predicted_us", choice.prediction.total_us},
                              {"speedup", speedup(call)},
                              {"jitter", options.simulation.jitter},
                              {"seed", options.simulation.seed},
                              {"events", call.overlap.num_events},
                              {"critical_path", call.overlap.critical_path}};
  if (p.method) add_exposed(call, json);
  for (const RankSimulation& rank : call.overlap.ranks) {
    json["rank_times"].push_back({{"finish_us", rank.finish_us},
                                  {"compute_us", rank.compute_us},
                                  {"exposed_us", rank.exposed_us},
                                  {"communicating_us", rank.communicating_us},
                                  {"idle_fraction", rank.idle_fraction},
                                  {"sent_bytes", rank.sent_bytes},
                                  {"received_bytes", rank.received_bytes}});
  }
  return json;
}

std::vector<SweepRow> sweep(const SimulateOptions& options, const MachineProfile& machine,
                            const std::string& what) {
  const std::size_t equals = what.find('=');
  const std::string name = what.substr(0, equals);
  require_choice("--sweep", name, {"m", "n", "k", "ranks", "units"});
  if (equals == std::string::npos) {
    throw CLI::ValidationError("--sweep", fmt::format("'{}' has no values; expected {}=1,2,3", what, name));
  }
  constexpr IntegerRange kValues{1, std::int64_t{1} << 40};
  std::vector<SweepRow> rows;
  for (const std::int64_t value : parse_integer_list("--sweep", what.substr(equals + 1), kValues)) {
    SimulateOptions varied = options;
    varied.simulation.timeline_ranks = 0;
    if (name == "m") varied.problem.m = value;
    if (name == "n") varied.problem.n = value;
    if (name == "k") varied.problem.k = value;
    if (name == "ranks") varied.problem.ranks = value;
    if (name == "units") varied.units = value;
    rows.push_back({varied, simulate_call(varied, machine)});
  }
  return rows;
}

std::string sweep_text(const std::vector<SweepRow>& rows, const MachineProfile& machine) {
  std::string text =
      fmt::format("# simulated on {} ({}); times in us\n", machine.name, machine.provenance.kind);
  text += fmt::format("{:>8} {:>8} {:>8} {:>6} {:>6} {:>6} {:>7} {:>12} {:>12} {:>12} {:>8}  {}\n", "m", "n",
                      "k", "ranks", "units", "comm", "waves", "serial", "overlapped", "predicted", "speed-up",
                      "groups");
  for (const SweepRow& row : rows) {
    const ProblemOptions& p = row.options.problem;
    const TuneChoice& choice = row.call.tuned.best;
    const auto waves = std::accumulate(choice.partition.begin(), choice.partition.end(), std::int64_t{0});
    text += fmt::format(
        "{:>8} {:>8} {:>8} {:>6} {:>6} {:>6} {:>7} {:>12.1f} {:>12.1f} {:>12.1f} {:>8.3f}  {}\n", p.m, p.n,
        p.k, p.ranks, choice.resources.compute_units, choice.resources.communication_units, waves,
        row.call.serial.total_us, row.call.overlap.total_us, choice.prediction.total_us, speedup(row.call),
        text_of_list(choice.partition));
  }
  return text;
}

std::string sweep_csv(const std::vector<SweepRow>& rows) {
  std::string text =
      "op,m,n,k,dtype,ranks,tile_m,tile_n,compute_units,communication_units,groups,simulated_serial_us,"
      "simulated_overlap_us,predicted_us,simulated_speedup\n";
  for (const SweepRow& row : rows) {
    const ProblemOptions& p = row.options.problem;
    const TuneChoice& choice = row.call.tuned.best;
    text += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{:.3f},{:.3f},{:.3f},{:.4f}\n", name_of(p.op), p.m,
                        p.n, p.k, name_of(p.dtype), p.ranks, choice.tile.tile_m, choice.tile.tile_n,
                        choice.resources.compute_units, choice.resources.communication_units,
                        fmt::join(choice.partition, " "), row.call.serial.total_us, row.call.overlap.total_us,
                        choice.prediction.total_us, speedup(row.call));
  }
  return text;
}

nlohmann::ordered_json sweep_json(const std::vector<SweepRow>& rows, const MachineProfile& machine) {
  nlohmann::ordered_json json{{"simulated", true}, {"machine", machine.name}};
  for (const SweepRow& row : rows) {
    nlohmann::ordered_json one = simulated_json(row.options, machine, row.call);
    one.erase("rank_times");
    json["rows"].push_back(std::move(one));
  }
  return json;
}

}  // namespace flashoverlap::cli

#include "sliced_simulate.h"

#include <fmt/format.h>

#include <algorithm>

#include "flashoverlap/simulator.h"
#include "flashoverlap/slice_choice.h"
#include "format.h"
#include "option_values.h"

/// `flashoverlap simulate` for operators whose data travels in slices.
namespace flashoverlap::cli {
namespace {

SimulatedMethod simulate_plans(const SlicedProblem& p, const MachineProfile& machine, SlicedPlan which) {
  const SimulationResult result = simulate(make_sliced_plans(p, which), machine);
  SimulatedMethod simulated{.total_us = result.total_us};
  for (const RankSimulation& rank : result.ranks) {
    simulated.alone_us = std::max(simulated.alone_us, rank.alone_us);
    simulated.exposed_us = std::max(simulated.exposed_us, rank.exposed_communication_us);
    simulated.communicating_us = std::max(simulated.communicating_us, rank.communicating_us);
  }
  return simulated;
}

/// Tile and units of the machine where they are open.
void fill_in(SlicedProblem& p, const MachineProfile& machine) {
  const DType dtype = parse_dtype(p.dtype);
  for (const GemmKernel& kernel : machine.gemm.kernels) {
    if (kernel.dtype != dtype) continue;
    if (p.tile_m == 0) p.tile_m = kernel.tile_m;
    if (p.tile_n == 0) p.tile_n = kernel.tile_n;
  }
  if (p.threads == 0) p.threads = machine.gemm.compute_units(dtype, p.tile_m, p.tile_n, machine.units);
}

/// As the operators choose it where the problem leaves it open.
PartsChoice choose_parts(const SlicedProblem& p, const MachineProfile& machine) {
  return flashoverlap::choose_parts({.operation = std::string(name_of(p.op)),
                                     .world_size = static_cast<std::int32_t>(p.ranks),
                                     .plan =
                                         [&](std::int32_t rank, const SliceCut& cut) {
                                           SlicedProblem of_rank = p;
                                           of_rank.parts = cut.parts;
                                           of_rank.send_channels = cut.send_channels;
                                           return make_sliced_plan(of_rank, plan_options(of_rank, rank),
                                                                   SlicedPlan::kTailFree);
                                         },
                                     .given = {.parts = p.parts, .send_channels = p.send_channels}},
                                    machine);
}

int simulate_problem(const SlicedProblem& problem, const std::string& machine_name, bool json) {
  const MachineProfile machine = machine_of(machine_name);
  const SimulatedSlices call = simulate_slices(problem, machine);
  const SlicedProblem& p = call.problem;
  const auto& [overlap, sliced, serial] = call.methods;
  const double communication_us = serial.communicating_us;
  const auto share = [&](const SimulatedMethod& s) { return s.share_of(communication_us); };
  if (json) {
    print_json({{"simulated", true},
                {"machine", machine.name},
                {"op", name_of(p.op)},
                {"ranks", p.ranks},
                {"m", p.m},
                {"n", p.n},
                {"k", p.k},
                {"dtype", p.dtype},
                {"parts", p.parts},
                {"gemm_us", overlap.alone_us},
                {"communication_us", communication_us},
                {"serial_us", serial.total_us},
                {"send_channels", p.send_channels},
                {"sliced_us", sliced.total_us},
                {"overlap_us", overlap.total_us},
                {"exposed_us", overlap.exposed_us},
                {"exposed_share", share(overlap)},
                {"sliced_exposed_us", sliced.exposed_us},
                {"sliced_exposed_share", share(sliced)}});
    return 0;
  }
  const auto row = [&](const SimulatedMethod& s) { return text_of(s, communication_us); };
  std::vector<std::pair<std::string, std::string>> rows = {
      {"operator", text_of(p)},
      {"machine", fmt::format("{} ({}), simulated", machine.name, machine.provenance.kind)},
      {"parts", call.parts},
      {"", ""},
      {"GEMM alone", text_of_us(overlap.alone_us)},
      {"communication", text_of_us(communication_us) + "  (as one collective)"},
      {"serial", row(serial)},
      {fmt::format("{} slices", p.baseline_slices), row(sliced)},
      {"tail-free", row(overlap)}};
  fmt::print("{}", to_table(rows));
  return 0;
}

}  // namespace

MachineProfile machine_of(const std::string& name) {
  if (name.empty()) {
    throw CLI::ValidationError("--machine",
                               "is needed: a shipped profile's name or a file of flashoverlap profile");
  }
  return load_machine_profile(name);
}

std::string text_of(const SimulatedMethod& method, double communication_us) {
  return fmt::format("{}, exposed communication {} ({:.2f} % of it)", text_of_us(method.total_us),
                     text_of_us(method.exposed_us), 100 * method.share_of(communication_us));
}

SimulatedSlices simulate_slices(SlicedProblem p, const MachineProfile& machine) {
  fill_in(p, machine);
  const PartsChoice parts = choose_parts(p, machine);
  p.parts = parts.cut.parts;
  p.send_channels = parts.cut.send_channels;
  return {.problem = p,
          .parts = parts.reason,
          .methods = {.overlap = simulate_plans(p, machine, SlicedPlan::kTailFree),
                      .sliced = simulate_plans(p, machine, SlicedPlan::kSliced),
                      .serial = simulate_plans(p, machine, SlicedPlan::kSerial)}};
}

void add_sliced_simulate(CLI::App& parent, Action& action) {
  add_sliced_subcommands(parent, action, [](CLI::App& sub, const std::shared_ptr<SlicedProblem>& problem) {
    const auto machine = std::make_shared<std::string>();
    const auto json = std::make_shared<bool>(false);
    sub.add_option("--machine", *machine, "A file, or a shipped profile")->type_name("NAME|FILE");
    sub.add_flag("--json", *json, "Print one JSON object instead of the table");
    return Action([=] { return simulate_problem(*problem, *machine, *json); });
  });
}

}  // namespace flashoverlap::cli

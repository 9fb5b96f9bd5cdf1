#include <fmt/format.h>

#include <algorithm>

#include "core/fail.h"
#include "flashoverlap/machine_profile.h"
#include "flashoverlap/simulator.h"
#include "flashoverlap/slice_choice.h"
#include "format.h"
#include "option_values.h"
#include "sliced_options.h"

/// `flashoverlap plan` and `flashoverlap simulate` for operators whose data travels in slices.
namespace flashoverlap::cli {
namespace {

constexpr std::int64_t kDefaultTile = 128;

PlanOptions plan_options(const SlicedProblem& p, std::int64_t rank) {
  PlanOptions options{.rank = static_cast<std::int32_t>(rank),
                      .world_size = static_cast<std::int32_t>(p.ranks),
                      .dtype = parse_dtype(p.dtype),
                      .m = p.m,
                      .n = p.n,
                      .k = p.k,
                      .tile_m = p.tile_m == 0 ? kDefaultTile : p.tile_m,
                      .tile_n = p.tile_n == 0 ? kDefaultTile : p.tile_n,
                      .swizzle = p.swizzle == 0 ? 1 : p.swizzle,
                      .resources = {},
                      .partition = {}};
  options.resources.compute_units = p.threads == 0 ? 1 : p.threads;
  return options;
}

std::vector<OverlapPlan> make_plans(const SlicedProblem& p, SlicedPlan which) {
  std::vector<OverlapPlan> plans;
  for (std::int64_t rank = 0; rank < p.ranks; ++rank) {
    plans.push_back(make_sliced_plan(p, plan_options(p, rank), which));
  }
  return plans;
}

int print_plan(const SlicedProblem& p, std::int64_t rank, bool json) {
  if (rank >= p.ranks) {
    throw CLI::ValidationError(
        "--rank", fmt::format("'{}' is not accepted; expected an integer from 0 to {}, below --ranks", rank,
                              p.ranks - 1));
  }
  const std::vector<OverlapPlan> plans = make_plans(p, SlicedPlan::kTailFree);
  if (const Verdict verdict = verify(plans); !verdict) core::fail(ErrorKind::kInternal, "{}", verdict.reason);
  const OverlapPlan& plan = plans[static_cast<std::size_t>(rank)];
  if (json) {
    fmt::print("{}\n", to_json(plan));
  } else {
    fmt::print("{}verified: the plans of all {} ranks\n", to_text(plan), plans.size());
  }
  return 0;
}

struct Simulated {
  double total_us = 0;
  double alone_us = 0;
  double exposed_us = 0;  ///< Of the rank with the most.
  double communicating_us = 0;
};

Simulated simulate_plans(const SlicedProblem& p, const MachineProfile& machine, SlicedPlan which) {
  const SimulationResult result = simulate(make_plans(p, which), machine);
  Simulated simulated{.total_us = result.total_us};
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

int simulate_problem(SlicedProblem p, const std::string& machine_name, bool json) {
  if (machine_name.empty()) {
    throw CLI::ValidationError("--machine",
                               "is needed: a shipped profile's name or a file of flashoverlap profile");
  }
  const MachineProfile machine = load_machine_profile(machine_name);
  fill_in(p, machine);
  const PartsChoice parts = choose_parts(p, machine);
  p.parts = parts.cut.parts;
  p.send_channels = parts.cut.send_channels;
  const Simulated overlap = simulate_plans(p, machine, SlicedPlan::kTailFree);
  const Simulated sliced = simulate_plans(p, machine, SlicedPlan::kSliced);
  const Simulated serial = simulate_plans(p, machine, SlicedPlan::kSerial);
  const double communication_us = serial.communicating_us;
  const auto share = [&](const Simulated& s) {
    return communication_us > 0 ? s.exposed_us / communication_us : 0;
  };
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
  const auto row = [&](const Simulated& s) {
    return fmt::format("{}, exposed communication {} ({:.2f} % of it)", text_of_us(s.total_us),
                       text_of_us(s.exposed_us), 100 * share(s));
  };
  std::vector<std::pair<std::string, std::string>> rows = {
      {"operator", text_of(p)},
      {"machine", fmt::format("{} ({}), simulated", machine.name, machine.provenance.kind)},
      {"parts", parts.reason},
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

void add_sliced_plan(CLI::App& parent, Action& action) {
  add_sliced_subcommands(parent, action, [](CLI::App& sub, const std::shared_ptr<SlicedProblem>& problem) {
    const auto rank = std::make_shared<std::int64_t>(0);
    const auto json = std::make_shared<bool>(false);
    add_integer(sub, "--rank", *rank, {0, 1023}, "Whose plan to print")->default_str("0");
    sub.add_flag("--json", *json, "Print one JSON object instead of text");
    return Action([=] { return print_plan(*problem, *rank, *json); });
  });
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

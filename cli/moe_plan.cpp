#include <fmt/format.h>

#include <algorithm>

#include "core/fail.h"
#include "flashoverlap/machine_profile.h"
#include "flashoverlap/moe_choice.h"
#include "format.h"
#include "moe_options.h"
#include "option_values.h"

/// `flashoverlap plan moe-layer` and `flashoverlap simulate moe-layer`.
namespace flashoverlap::cli {
namespace {

struct MoePlan {
  MoeProblem problem;
  std::int64_t rank = 0;
  std::string json;  ///< Empty, "dispatch" or "combine".
};

/// Wasted rows a rank by world size, with the same rows a rank and experts a rank, balanced.
std::string waste_table(const MoeProblem& problem) {
  std::string text =
      "wasted rows a rank, balanced, the same tokens and experts a rank:\n  ranks       paper      shared\n";
  const std::int64_t local = std::max<std::int64_t>(1, problem.experts / problem.ranks);
  for (const std::int32_t world : {4, 8, 16, 32, 64, 128, 256}) {
    MoePlanOptions options = moe_plan_options(problem, 0);
    options.world_size = world;
    options.num_experts = local * world;
    options.order = MoeOrder::kExpertMajor;
    options.transport = MoeTransport::kPut;
    // Every rank spreads its slots over all experts evenly; the first experts get what is left over.
    const std::int64_t slots = problem.tokens * problem.top_k;
    MoeCounts counts{world, options.num_experts, {}};
    for (std::int32_t rank = 0; rank < world; ++rank) {
      for (std::int64_t e = 0; e < options.num_experts; ++e) {
        counts.rows.push_back(slots / options.num_experts + (e < slots % options.num_experts ? 1 : 0));
      }
    }
    options.padding = MoePadding::kPaper;
    const std::int64_t paper = moe_waste(options, counts).wasted_rows();
    options.padding = MoePadding::kShared;
    text += fmt::format("  {:5}  {:10}  {:10}\n", world, paper, moe_waste(options, counts).wasted_rows());
  }
  return text;
}

int plan_moe(MoePlan& command) {
  MoeProblem& p = command.problem;
  if (command.rank >= p.ranks) {
    throw CLI::ValidationError("--rank",
                               fmt::format("'{}' is not accepted; expected an integer from 0 to {}, below "
                                           "--ranks",
                                           command.rank, p.ranks - 1));
  }
  const MoeCounts counts = counts_of(make_routings(p), p.capacity);
  const MoePlanOptions options = moe_plan_options(p, static_cast<std::int32_t>(command.rank));
  const auto rank = static_cast<std::size_t>(command.rank);
  const std::vector<OverlapPlan> dispatch =
      plan_moe_dispatch_all(options, counts, 2 * p.intermediate, p.hidden);
  const std::vector<OverlapPlan> combine = plan_moe_combine_all(options, counts, p.hidden, p.intermediate);
  for (const auto* plans : {&dispatch, &combine}) {
    if (const Verdict verdict = verify(std::span<const OverlapPlan>(*plans)); !verdict) {
      core::fail(ErrorKind::kInternal, "{}", verdict.reason);
    }
  }
  if (!command.json.empty()) {
    fmt::print("{}\n", to_json(command.json == "dispatch" ? dispatch[rank] : combine[rank]));
    return kExitSuccess;
  }
  fmt::print(
      "{}\n{}\ndispatch and first GEMM\n{}\nsecond GEMM and return\n{}verified: the plans of all {} ranks\n",
      moe_plan_text(options, counts), waste_table(p), to_text(dispatch[rank]), to_text(combine[rank]),
      p.ranks);
  return kExitSuccess;
}

struct MoeSimulation {
  MoeProblem problem;
  std::string machine;
  SimulationOptions simulation;
  bool search = false;
  bool backward = false;
  bool json = false;
};

/// One GEMM with its transfer.
struct Phase {
  double compute_us = 0;  ///< The slowest rank's tiles, without anything to wait for.
  double serial_us = 0;
  double overlap_us = 0;
  [[nodiscard]] double exposed_us() const { return std::max(0.0, overlap_us - compute_us); }
  /// Share of the transfer's own time that is hidden.
  [[nodiscard]] double ratio() const {
    const double transfer_us = serial_us - compute_us;
    return transfer_us <= 0 ? 1 : std::clamp(1 - (overlap_us - compute_us) / transfer_us, 0.0, 1.0);
  }
};

MoeChoice simulate_layer(const MoeSimulation& command, const MachineProfile& machine,
                         const MoeCounts& counts) {
  const MoeProblem& problem = command.problem;
  MoeChoiceRequest request;
  request.counts = counts;
  request.options = moe_plan_options(problem, 0);
  request.options.resources = {.compute_units = machine.units, .communication_units = problem.consumers};
  request.hidden = problem.hidden;
  // The first GEMM's columns and the second's depth: backward both projections are transposed.
  const std::int64_t middle = 2 * problem.intermediate;
  request.hidden_cols = command.backward ? problem.intermediate : middle;
  request.intermediate = command.backward ? middle : problem.intermediate;
  request.simulation = command.simulation;
  if (command.search) {
    request.consumers = {1, 2, 4, 8, 16};
    request.segment_bands = {1, 2, 4, 8, 16, 32, 64};
  }
  return choose_moe(request, machine);
}

void check_size(const MoeProblem& p) {
  const MoePlanOptions o = moe_plan_options(p, 0);
  const double rows = static_cast<double>(p.ranks * p.tokens * p.top_k);
  const double cols = static_cast<double>(std::max(2 * p.intermediate, p.hidden));
  const double tiles = rows / static_cast<double>(o.tile_m) * cols / static_cast<double>(o.tile_n);
  constexpr double kMaxTiles = 2e7;  // about 4 GiB of plans
  if (tiles <= kMaxTiles) return;
  core::fail(
      ErrorKind::kOutOfMemory,
      "--ranks, --tokens, --top-k, --hidden, --intermediate: {:.3g} tiles in all; at most {:.3g} can be "
      "simulated, so take fewer, or larger ones",
      tiles, kMaxTiles);
}

int simulate_moe(MoeSimulation& command) {
  if (command.machine.empty()) {
    throw CLI::ValidationError("--machine",
                               "is needed: a shipped profile's name or a file of flashoverlap profile");
  }
  MoeProblem& p = command.problem;
  command.simulation.seed = p.seed;
  const MachineProfile machine = load_machine_profile(command.machine);
  if (machine.units <= p.consumers) {
    throw CLI::ValidationError("--consumers",
                               fmt::format("'{}' is not accepted; expected fewer than the machine's {} "
                                           "units",
                                           p.consumers, machine.units));
  }
  const MoeCounts counts = counts_of(make_routings(p), p.capacity);
  check_size(p);
  const MoeChoice choice = simulate_layer(command, machine, counts);
  const MoeCandidate& best = choice.best_overlap();
  const Phase dispatch{choice.dispatch_gemm_us, choice.serial.dispatch_us, best.dispatch_us};
  const Phase combine{choice.combine_gemm_us, choice.serial.combine_us, best.combine_us};
  // Gradients of the weights are as many products as the two GEMMs, and as quick in this model. They fill
  // what is exposed, as far as they last.
  const double weights = command.backward ? dispatch.compute_us + combine.compute_us : 0;
  const double serial = choice.serial.total_us() + weights;
  const double overlap =
      best.total_us() + std::max(0.0, weights - dispatch.exposed_us() - combine.exposed_us());
  if (command.json) {
    const auto json_of = [](const Phase& phase) {
      return nlohmann::ordered_json{{"compute_us", phase.compute_us},
                                    {"serial_us", phase.serial_us},
                                    {"overlap_us", phase.overlap_us},
                                    {"overlap_ratio", phase.ratio()}};
    };
    print_json({{"operator", "moe-layer"},
                {"machine", machine.name},
                {"simulated", true},
                {"ranks", p.ranks},
                {"backward", command.backward},
                {"weights_us", weights},
                {"dispatch", json_of(dispatch)},
                {"combine", json_of(combine)},
                {"consumers", best.options.resources.communication_units},
                {"segment_bands", best.options.segment_bands},
                {"choice", choice.overlaps() ? "overlap" : "serial"},
                {"serial_us", serial},
                {"overlap_us", overlap},
                {"speedup", serial / overlap},
                {"chosen_us", std::min(serial, overlap)}});
    return kExitSuccess;
  }
  const auto row = [](const Phase& phase) {
    return fmt::format("GEMM alone {}, serial {}, overlapped {}, overlap ratio {:.3f}",
                       text_of_us(phase.compute_us), text_of_us(phase.serial_us),
                       text_of_us(phase.overlap_us), phase.ratio());
  };
  fmt::print("{}",
             to_table({{"operator", text_of(p)},
                       {"machine", fmt::format("{} ({}), simulated", machine.name, machine.provenance.kind)},
                       {"dispatch", row(dispatch)},
                       {"return", row(combine)},
                       {"consumers",
                        fmt::format("{}, {} bands a segment", best.options.resources.communication_units,
                                    best.options.segment_bands)},
                       {command.backward ? "with weights" : "both",
                        fmt::format("serial {}, overlapped {}: {:.3f}x (activation and sum not counted)",
                                    text_of_us(serial), text_of_us(overlap), serial / overlap)},
                       {"choice", choice.reason}}));
  return kExitSuccess;
}

}  // namespace

void add_moe_plan(CLI::App& parent, Action& action) {
  const auto command = std::make_shared<MoePlan>();
  CLI::App& sub = add_moe_subcommand(parent, std::shared_ptr<MoeProblem>(command, &command->problem),
                                     "Print layout, combine plan, segments and both plans of one rank");
  add_integer(sub, "--rank", command->rank, {0, 1023}, "Whose plans to print")->default_str("0");
  add_choice(sub, "--json", command->json, {"dispatch", "combine"}, "Print this plan as one JSON object");
  sub.callback([&sub, command, &action] {
    require_options_behind(sub);
    action = [command] { return plan_moe(*command); };
  });
}

void add_moe_simulate(CLI::App& parent, Action& action) {
  const auto command = std::make_shared<MoeSimulation>();
  CLI::App& sub =
      add_moe_subcommand(parent, std::shared_ptr<MoeProblem>(command, &command->problem),
                         "Simulate both GEMMs of a mixture-of-experts layer with their all-to-alls");
  sub.add_option("--machine", command->machine, "A file, or a shipped profile")->type_name("NAME|FILE");
  constexpr double kMaxJitter = 1;
  add_number(sub, "--jitter", command->simulation.jitter, 0, kMaxJitter,
             "Relative standard deviation of tile and transfer times")
      ->default_str("0");
  sub.add_flag("--backward", command->backward,
               "The backward pass: gradients by the results are dispatched, those by the tokens return, and\n"
               "gradients of the weights fill what both expose, at best");
  sub.add_flag("--search", command->search, "Take the best of 1 to 16 consumers and 1 to 64 bands a segment");
  sub.add_flag("--json", command->json, "Print one JSON object instead of the table");
  sub.callback([&sub, command, &action] {
    require_options_behind(sub);
    action = [command] { return simulate_moe(*command); };
  });
}

}  // namespace flashoverlap::cli

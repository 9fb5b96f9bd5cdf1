#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "commands.h"
#include "core/fail.h"
#include "files.h"
#include "flashoverlap/plan.h"
#include "format.h"
#include "moe_options.h"
#include "option_values.h"
#include "problem_options.h"
#include "sliced_options.h"

namespace flashoverlap::cli {
namespace {

struct PlanCommand {
  ProblemOptions problem;
  std::int64_t rank = 0;
  bool json = false;
  std::string load_path;
};

/// The plans that `flashoverlap run` with the same options carries out.
std::vector<OverlapPlan> make_plans(const ProblemOptions& problem) {
  require_memory(memory_estimate(problem));
  const Routing routing = make_routing(problem);
  std::vector<OverlapPlan> plans(static_cast<std::size_t>(problem.ranks));
  run_problem(problem, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context(communicator, context_options(problem));
    plans[static_cast<std::size_t>(communicator->rank())] = make_operator(context, problem, routing)->plan();
  });
  return plans;
}

OverlapPlan load_plan(const std::string& path) {
  const std::string text = read_file("--load", path);
  try {
    return plan_from_json(text);
  } catch (const Error& error) {
    core::fail(error.kind(), "--load: '{}': {}", path, error.what());
  }
}

void print_plan(const OverlapPlan& plan, const std::string& verified, bool json) {
  if (json) {
    fmt::print("{}\n", to_json(plan));
  } else {
    fmt::print("{}{}\n", to_text(plan), verified);
  }
}

int plan(const PlanCommand& command) {
  if (!command.load_path.empty()) {
    print_plan(load_plan(command.load_path), "verified: this rank's plan", command.json);
    return kExitSuccess;
  }
  if (command.rank >= command.problem.ranks) {
    throw CLI::ValidationError(
        "--rank", fmt::format("'{}' is not accepted; expected an integer from 0 to {}, below --ranks",
                              command.rank, command.problem.ranks - 1));
  }
  require_runnable(command.problem);
  const std::vector<OverlapPlan> plans = make_plans(command.problem);
  if (const Verdict verdict = verify(plans); !verdict) core::fail(ErrorKind::kInternal, "{}", verdict.reason);
  print_plan(plans[static_cast<std::size_t>(command.rank)],
             fmt::format("verified: the plans of all {} ranks", plans.size()), command.json);
  return kExitSuccess;
}

}  // namespace

void add_plan_command(CLI::App& app, Action& action) {
  CLI::App* sub = app.add_subcommand(
      "plan", "Print the overlap plan of one rank, verified together with all ranks' plans");
  const auto command = std::make_shared<PlanCommand>();
  add_problem_options(*sub, std::shared_ptr<ProblemOptions>(command, &command->problem),
                      MethodOptions::kPresent);
  constexpr IntegerRange kRanks{0, 1023};
  add_integer(*sub, "--rank", command->rank, kRanks, "Whose plan to print")->default_str("0");
  CLI::Option* load = sub->add_option("--load", command->load_path,
                                      "Read and verify a plan that --json printed, instead of making one");
  load->type_name("FILE");
  for (CLI::Option* option : sub->get_options()) {
    if (option != load && option != sub->get_help_ptr()) load->excludes(option);
  }
  sub->add_flag("--json", command->json, "Print one JSON object instead of text");
  add_moe_plan(*sub, action);
  add_sliced_plan(*sub, action);
  sub->callback([sub, command, &action] {
    if (sub->get_subcommands().empty()) action = [command] { return plan(*command); };
  });
}

}  // namespace flashoverlap::cli

#include <fmt/format.h>

#include "core/fail.h"
#include "format.h"
#include "option_values.h"
#include "sliced_options.h"

/// `flashoverlap plan` for operators whose data travels in slices.
namespace flashoverlap::cli {
namespace {

int print_plan(const SlicedProblem& p, std::int64_t rank, bool json) {
  if (rank >= p.ranks) {
    throw CLI::ValidationError(
        "--rank", fmt::format("'{}' is not accepted; expected an integer from 0 to {}, below --ranks", rank,
                              p.ranks - 1));
  }
  const std::vector<OverlapPlan> plans = make_sliced_plans(p, SlicedPlan::kTailFree);
  if (const Verdict verdict = verify(plans); !verdict) core::fail(ErrorKind::kInternal, "{}", verdict.reason);
  const OverlapPlan& plan = plans[static_cast<std::size_t>(rank)];
  if (json) {
    fmt::print("{}\n", to_json(plan));
  } else {
    fmt::print("{}verified: the plans of all {} ranks\n", to_text(plan), plans.size());
  }
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

}  // namespace flashoverlap::cli

#include "sliced_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/fail.h"
#include "format.h"
#include "option_values.h"

namespace flashoverlap::cli {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 30U;
constexpr std::int64_t kDefaultTile = 128;

struct OpText {
  SlicedOp op;
  const char* name;
  const char* description;
};

constexpr std::array kOps = {
    OpText{SlicedOp::kAllGatherGemm, "all-gather-gemm",
           "Rows of A are gathered while the GEMM runs (tensor parallelism behind sequence parallelism)"},
    OpText{SlicedOp::kShardedWeight, "sharded-weight-gemm",
           "Rows of the weight B are gathered while the GEMM runs (data parallelism, forward)"},
    OpText{SlicedOp::kGradient, "gradient-reduce-scatter",
           "The weight's gradient is scattered while the GEMM runs (data parallelism, backward)"},
    OpText{SlicedOp::kHeads, "gemm-all-to-all-heads",
           "Projection before Ulysses attention: columns go to the ranks of their heads"},
    OpText{SlicedOp::kFromHeads, "all-to-all-gemm",
           "Projection behind Ulysses attention: the heads' columns of this rank's tokens arrive meanwhile"},
};

}  // namespace

std::string_view name_of(SlicedOp op) {
  const auto* text = std::ranges::find(kOps, op, &OpText::op);
  return text == kOps.end() ? "gemm-reduce-scatter" : text->name;
}

void add_sliced_subcommands(
    CLI::App& parent, Action& action,
    const std::function<Action(CLI::App&, const std::shared_ptr<SlicedProblem>&)>& make) {
  for (const OpText& text : kOps) {
    CLI::App& sub = *parent.add_subcommand(text.name, text.description);
    const auto problem = std::make_shared<SlicedProblem>();
    SlicedProblem& p = *problem;
    p.op = text.op;
    const auto integer = [&](const char* name, std::int64_t& value, std::int64_t least, std::int64_t most,
                             const char* description) {
      add_integer(sub, name, value, {least, most}, description)->default_str(std::to_string(value));
    };
    integer("-m,--m", p.m, 0, kMost, "Rows of the product (of all ranks together, where they are spread)");
    integer("-n,--n", p.n, 0, kMost, "Columns of the product");
    integer("-k,--k", p.k, 0, kMost, "Columns of A and B");
    integer("--ranks", p.ranks, 1, 64, "World size: ranks are threads of this process");
    add_choice(sub, "--dtype", p.dtype, {"f32", "bf16", "f16"}, "Element type")->default_str(p.dtype);
    add_integer_or_auto(sub, "--tile-m", p.tile_m, {1, kMost}, "Rows of a tile")->default_str("auto");
    add_integer_or_auto(sub, "--tile-n", p.tile_n, {1, kMost}, "Columns of a tile")->default_str("auto");
    add_integer_or_auto(sub, "--swizzle", p.swizzle, {1, kMost}, "Tile rows that are walked together")
        ->default_str("auto");
    sub.add_option_function<std::string>(
           "--slices",
           [problem](const std::string& value) {
             problem->slices = parse_integer_list("--slices", value, {0, kMost});
           },
           "Rows (columns) of each rank's slice; when not given, equal")
        ->type_name("LIST");
    add_integer_or_auto(sub, "--parts", p.parts, {1, kMost},
                        "Transfers that a slice is cut into; auto: as pays on the machine that is known,\n"
                        "otherwise as few as leave no tail")
        ->default_str("auto");
    add_integer_or_auto(sub, "--send-channels", p.send_channels, {1, 63},
                        "Slices that a rank may be sending at a time; auto: as pays on the machine that is\n"
                        "known, otherwise 2 where slices leave as they are computed and 1 elsewhere")
        ->default_str("auto");
    integer("--baseline-slices", p.baseline_slices, 1, 1024,
            "Slices of the baseline with one collective for each");
    add_integer_or_auto(sub, "--threads", p.threads, {1, 1024}, "Compute threads (units) of each rank")
        ->default_str("auto");
    add_seed(sub, p.seed);
    const Action chosen = make(sub, problem);
    sub.callback([&sub, chosen, &action] {
      require_options_behind(sub);
      action = chosen;
    });
  }
}

SliceOptions slice_options(const SlicedProblem& problem) {
  return {.sizes = problem.slices, .parts = problem.parts, .send_channels = problem.send_channels};
}

std::int64_t sliced_size(const SlicedProblem& problem) {
  switch (problem.op) {
    case SlicedOp::kAllGatherGemm:
    case SlicedOp::kReduceScatter:
    case SlicedOp::kGradient:
      return problem.m;
    case SlicedOp::kShardedWeight:
    case SlicedOp::kHeads:
      return problem.n;
    case SlicedOp::kFromHeads:
      return problem.k;
  }
  core::fail(ErrorKind::kInternal, "operator {} is not known here", static_cast<int>(problem.op));
}

HeadSlices head_slices(const SlicedProblem& problem) {
  if (plan::along_heads(problem.op)) return {.rows = {}, .columns = slice_options(problem)};
  return {.rows = slice_options(problem), .columns = {}};
}

GemmOptions gemm_options(const SlicedProblem& problem) {
  return {.m = problem.m,
          .n = problem.n,
          .k = problem.k,
          .dtype = parse_dtype(problem.dtype),
          .tile_m = problem.tile_m,
          .tile_n = problem.tile_n,
          .swizzle = problem.swizzle};
}

std::string text_of(const SlicedProblem& problem) {
  return fmt::format("{}  m={} n={} k={} {}, {} rank{}, slices {}", name_of(problem.op), problem.m, problem.n,
                     problem.k, problem.dtype, problem.ranks, problem.ranks == 1 ? "" : "s",
                     problem.slices.empty() ? "equal" : text_of_list(problem.slices));
}

OverlapPlan make_sliced_plan(const SlicedProblem& problem, const PlanOptions& options, SlicedPlan which) {
  return plan::plan_sliced_call(
      {.op = problem.op, .slices = head_slices(problem), .num_slices = problem.baseline_slices}, options,
      which);
}

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

std::vector<OverlapPlan> make_sliced_plans(const SlicedProblem& p, SlicedPlan which) {
  std::vector<OverlapPlan> plans;
  for (std::int64_t rank = 0; rank < p.ranks; ++rank) {
    plans.push_back(make_sliced_plan(p, plan_options(p, rank), which));
  }
  return plans;
}

}  // namespace flashoverlap::cli

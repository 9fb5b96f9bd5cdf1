#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "commands.h"
#include "flashoverlap/operators.h"
#include "plan/sliced_call.h"

/// `flashoverlap run|plan|simulate` for operators whose data travels in slices (arXiv 2604.24013): what all
/// three ask.
namespace flashoverlap::cli {

using plan::SlicedOp;
using plan::SlicedPlan;

struct SlicedProblem {
  SlicedOp op = SlicedOp::kAllGatherGemm;
  std::int64_t m = 2048;
  std::int64_t n = 2048;
  std::int64_t k = 1024;
  std::int64_t ranks = 2;
  std::string dtype = "f32";
  std::int64_t tile_m = 0;
  std::int64_t tile_n = 0;
  std::int64_t swizzle = 0;
  std::vector<std::int64_t> slices;  ///< Empty: equal.
  std::int64_t parts = 0;
  std::int64_t send_channels = 0;
  std::int64_t baseline_slices = 4;
  std::int64_t threads = 0;
  std::uint64_t seed = 1;
};

std::string_view name_of(SlicedOp op);

/// One subcommand of `parent` for each operator; `make` gets the subcommand and its problem, adds options of
/// its own and returns what is to be done.
void add_sliced_subcommands(
    CLI::App& parent, Action& action,
    const std::function<Action(CLI::App&, const std::shared_ptr<SlicedProblem>&)>& make);

[[nodiscard]] SliceOptions slice_options(const SlicedProblem& problem);
/// Size of what the slices cut.
[[nodiscard]] std::int64_t sliced_size(const SlicedProblem& problem);
[[nodiscard]] HeadSlices head_slices(const SlicedProblem& problem);
[[nodiscard]] GemmOptions gemm_options(const SlicedProblem& problem);
/// "all-gather-gemm  m=… n=… k=… f32, 4 ranks, slices …".
std::string text_of(const SlicedProblem& problem);

/// The plan that the operators make, for options that leave nothing open.
OverlapPlan make_sliced_plan(const SlicedProblem& problem, const PlanOptions& options, SlicedPlan which);
/// Of a rank, where no executor suggests a tile.
PlanOptions plan_options(const SlicedProblem& problem, std::int64_t rank);
/// Of all ranks.
std::vector<OverlapPlan> make_sliced_plans(const SlicedProblem& problem, SlicedPlan which);

void add_sliced_run(CLI::App& run, Action& action);
void add_sliced_plan(CLI::App& plan, Action& action);
void add_sliced_simulate(CLI::App& simulate, Action& action);

}  // namespace flashoverlap::cli

#include <string>
#include <utility>
#include <vector>

#include "core/fail.h"
#include "flashoverlap/operators.h"
#include "ops/agree.h"
#include "ops/choose.h"
#include "ops/sliced_plans.h"
#include "plan/sliced_call.h"

namespace flashoverlap {
namespace {

constexpr std::string_view kOperation = "gemm-reduce-scatter";

// The CPU executor has a stream, and so a thread, for each rank that it receives from.
constexpr int kMostTailFreeRanks = 64;

OverlapMethod resolve(const Context& context, const GemmOptions& options, OverlapMethod method) {
  if (method != OverlapMethod::kAuto) return method;
  // An executor that suggests plans (GPUs) cannot add at the end of a tile yet.
  const bool applies = !ops::has_suggestion(context, options) && options.partition.empty() &&
                       context.communicator().size() <= kMostTailFreeRanks;
  return applies ? OverlapMethod::kTailFree : OverlapMethod::kSignal;
}

ops::PreparedPlans prepare_tail_free(Context& context, const GemmOptions& options, const SliceOptions& slices,
                                     const BaselineOptions& baseline) {
  ops::SlicedRecipe recipe{
      .operation = kOperation,
      .slices = ops::to_text(slices, baseline),
      .parts = slices.parts,
      .overlap =
          [=](const PlanOptions& chosen, std::int64_t parts) {
            ops::check_baseline(baseline);
            return plan_tail_free_reduce_scatter(chosen, ops::in_parts(slices, parts));
          },
      .serial =
          [=](const PlanOptions& chosen) { return plan::plan_reduce_scatter_in_slices(chosen, slices, 1); }};
  if (baseline.num_slices > 0) {
    recipe.sliced = [=](const PlanOptions& chosen) {
      return plan::plan_reduce_scatter_in_slices(chosen, slices, baseline.num_slices);
    };
  }
  return ops::prepare_sliced(context, ops::plan_options(context, options), recipe);
}

ops::PreparedPlans prepare_signal(Context& context, const GemmOptions& options, const SliceOptions& slices) {
  const ops::PlanRecipe recipe{
      .operation = kOperation,
      .collective = TransferKind::kReduceScatter,
      .waves = [=](const PlanOptions& chosen) { return num_waves_reduce_scatter(chosen, slices); },
      .build = [=](const PlanOptions& chosen) { return plan_reduce_scatter(chosen, slices); },
      .variant = slices.sizes.empty() ? std::string(name_of(RowOwnership::kContiguous))
                                      : ops::to_text(SliceOptions{slices.sizes, 0})};
  return ops::prepare_plans(context, ops::plan_options(context, options), recipe);
}

}  // namespace

std::string_view name_of(OverlapMethod method) {
  switch (method) {
    case OverlapMethod::kSignal:
      return "signal";
    case OverlapMethod::kTailFree:
      return "tail-free";
    case OverlapMethod::kAuto:
      return "auto";
  }
  return "?";
}

GemmReduceScatter::GemmReduceScatter(Context& context, const GemmOptions& options, RowOwnership rows) {
  state_ = std::make_unique<State>();
  const ops::PlanRecipe recipe{
      .operation = kOperation,
      .collective = TransferKind::kReduceScatter,
      .waves = [rows](const PlanOptions& chosen) { return num_waves_reduce_scatter(chosen, rows); },
      .build = [rows](const PlanOptions& chosen) { return plan_reduce_scatter(chosen, rows); },
      .variant = std::string(name_of(rows))};
  state_->plans = ops::prepare_plans(context, ops::plan_options(context, options), recipe);
}

GemmReduceScatter::GemmReduceScatter(Context& context, const GemmOptions& options, OverlapMethod method,
                                     const SliceOptions& slices, const BaselineOptions& baseline)
    : method_(resolve(context, options, method)) {
  state_ = std::make_unique<State>();
  if (method_ == OverlapMethod::kTailFree) {
    state_->plans = prepare_tail_free(context, options, slices, baseline);
    return;
  }
  state_->plans = prepare_signal(context, options, slices);
  if (baseline.num_slices == 0) return;
  PlanOptions chosen = ops::plan_options(context, options);
  chosen.tile_m = plan().grid.tile_m();
  chosen.tile_n = plan().grid.tile_n();
  chosen.resources = plan().resources;
  ops::choose_tile(chosen);  // The order is left.
  const std::string operation = ops::with_shape(kOperation, options.m, options.n, options.k);
  ops::agree(context.communicator(), operation, [&]() -> ops::Ticket {
    ops::check_baseline(baseline);
    OverlapPlan sliced = plan::plan_reduce_scatter_in_slices(chosen, slices, baseline.num_slices);
    const std::uint64_t agreement = sliced.agreement;
    state_->plans.sliced = context.executor().prepare(std::move(sliced));
    return {.agreement = agreement, .description = "sliced baseline", .payload = {}};
  });
}

}  // namespace flashoverlap

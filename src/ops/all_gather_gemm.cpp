#include <utility>

#include "flashoverlap/operators.h"
#include "ops/sliced_plans.h"

namespace flashoverlap {
namespace {

ops::PreparedPlans prepare_gather(Context& context, const GemmOptions& options, const SliceOptions& slices,
                                  const BaselineOptions& baseline, SliceAxis axis) {
  ops::SlicedRecipe recipe{
      .operation = axis == SliceAxis::kRows ? "all-gather-gemm" : "sharded-weight-gemm",
      .slices = ops::to_text(slices, baseline),
      .cut = ops::cut_of(slices),
      .overlap =
          [=](const PlanOptions& chosen, const SliceCut& cut) {
            ops::check_baseline(baseline);
            return plan_all_gather_gemm(chosen, ops::with_cut(slices, cut), axis);
          },
      .serial =
          [=](const PlanOptions& chosen) { return plan_sliced_all_gather_gemm(chosen, slices, 1, axis); }};
  if (baseline.num_slices > 0) {
    recipe.sliced = [=](const PlanOptions& chosen) {
      return plan_sliced_all_gather_gemm(chosen, slices, baseline.num_slices, axis);
    };
  }
  PlanOptions chosen = ops::plan_options(context, options);
  return ops::prepare_sliced(context, std::move(chosen), recipe);
}

}  // namespace

AllGatherGemm::AllGatherGemm(Context& context, const GemmOptions& options, const SliceOptions& slices,
                             const BaselineOptions& baseline) {
  state_ = std::make_unique<State>();
  state_->plans = prepare_gather(context, options, slices, baseline, SliceAxis::kRows);
  const Communicator& ranks = context.communicator();
  const std::vector<std::int64_t> begins = slice_begins(slices, options.m, ranks.size());
  first_row_ = begins[static_cast<std::size_t>(ranks.rank())];
  num_rows_ = begins[static_cast<std::size_t>(ranks.rank()) + 1] - first_row_;
}

ShardedWeightGemm::ShardedWeightGemm(Context& context, const GemmOptions& options, const SliceOptions& slices,
                                     const BaselineOptions& baseline) {
  state_ = std::make_unique<State>();
  state_->plans = prepare_gather(context, options, slices, baseline, SliceAxis::kColumns);
  const Communicator& ranks = context.communicator();
  const std::vector<std::int64_t> begins = slice_begins(slices, options.n, ranks.size());
  first_row_ = begins[static_cast<std::size_t>(ranks.rank())];
  num_rows_ = begins[static_cast<std::size_t>(ranks.rank()) + 1] - first_row_;
}

}  // namespace flashoverlap

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "flashoverlap/operators.h"
#include "ops/sliced_plans.h"
#include "plan/arithmetic.h"

namespace flashoverlap {
namespace {

/// In all plans of the call: the sliced one takes each rank's columns in pieces.
ProductShape product_of_blocks(const HeadSlices& slices, const BaselineOptions& baseline,
                               const PlanOptions& options) {
  ProductShape product = ops::product_of_rows(slices, options);
  const std::vector<std::int64_t> begins = slice_begins(slices.columns, options.k, options.world_size);
  const std::int64_t pieces = std::max<std::int64_t>(1, baseline.num_slices);
  for (std::size_t rank = 1; rank < begins.size(); ++rank) {
    for (std::int64_t piece = 1; piece <= pieces; ++piece) {
      product.block_columns =
          std::gcd(product.block_columns, plan::share_begin(begins[rank] - begins[rank - 1], pieces, piece));
    }
  }
  return product;
}

}  // namespace

AllToAllGemm::AllToAllGemm(Context& context, const GemmOptions& options, const HeadSlices& slices,
                           const BaselineOptions& baseline) {
  state_ = std::make_unique<State>();
  ops::SlicedRecipe recipe{
      .operation = "all-to-all-gemm",
      .slices = ops::to_text(slices, baseline),
      .cut = ops::cut_of(slices.columns),
      .product = [&](const PlanOptions& chosen) { return product_of_blocks(slices, baseline, chosen); },
      .overlap =
          [&](const PlanOptions& chosen, const SliceCut& cut) {
            ops::check_baseline(baseline);
            return plan_all_to_all_gemm(chosen, ops::with_cut(slices, cut));
          },
      .serial = [&](const PlanOptions& chosen) { return plan_serial_all_to_all_gemm(chosen, slices); }};
  if (baseline.num_slices > 0) {
    recipe.sliced = [&](const PlanOptions& chosen) {
      return plan_sliced_all_to_all_gemm(chosen, slices, baseline.num_slices);
    };
  }
  state_->plans = ops::prepare_sliced(context, ops::plan_options(context, options), recipe);
  const Communicator& ranks = context.communicator();
  const auto rank = static_cast<std::size_t>(ranks.rank());
  first_row_ = slice_begins(slices.rows, options.m, ranks.size())[rank];
  const std::vector<std::int64_t> columns = slice_begins(slices.columns, options.k, ranks.size());
  first_column_ = columns[rank];
  num_columns_ = columns[rank + 1] - columns[rank];
}

}  // namespace flashoverlap

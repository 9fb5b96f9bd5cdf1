#include <utility>

#include "flashoverlap/operators.h"
#include "ops/sliced_plans.h"

namespace flashoverlap {

AllToAllGemm::AllToAllGemm(Context& context, const GemmOptions& options, const HeadSlices& slices) {
  state_ = std::make_unique<State>();
  const ops::SlicedRecipe recipe{
      .operation = "all-to-all-gemm",
      .slices = ops::to_text(slices),
      .parts = slices.columns.parts,
      .overlap =
          [&](const PlanOptions& chosen, std::int64_t parts) {
            return plan_all_to_all_gemm(chosen, ops::in_parts(slices, parts));
          },
      .serial = [&](const PlanOptions& chosen) { return plan_serial_all_to_all_gemm(chosen, slices); }};
  state_->plans = ops::prepare_sliced(context, ops::plan_options(context, options), recipe);
  const Communicator& ranks = context.communicator();
  const auto rank = static_cast<std::size_t>(ranks.rank());
  first_row_ = slice_begins(slices.rows, options.m, ranks.size())[rank];
  const std::vector<std::int64_t> columns = slice_begins(slices.columns, options.k, ranks.size());
  first_column_ = columns[rank];
  num_columns_ = columns[rank + 1] - columns[rank];
}

}  // namespace flashoverlap

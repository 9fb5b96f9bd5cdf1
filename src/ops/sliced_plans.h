#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "flashoverlap/operators.h"
#include "ops/operator_state.h"

/// Plans of operators whose data travels in slices rather than in wave groups.
namespace flashoverlap::ops {

struct SlicedRecipe {
  std::string_view operation;
  std::string slices;      ///< As text, to tell ranks apart that disagree.
  std::int64_t parts = 0;  ///< As the caller has it; 0: chosen, see SliceOptions.
  std::function<OverlapPlan(const PlanOptions&, std::int64_t parts)> overlap;
  std::function<OverlapPlan(const PlanOptions&)> serial;
  std::function<OverlapPlan(const PlanOptions&)> sliced = {};  ///< Empty: no such baseline.
};

/// Chooses the tile and the parts where they are open, builds and prepares the plans, and agrees on them with
/// the other ranks. Collective.
PreparedPlans prepare_sliced(Context& context, PlanOptions options, const SlicedRecipe& recipe);

/// Error(kBadArgument) unless num_slices >= 0.
void check_baseline(const BaselineOptions& baseline);

/// The same slices in so many parts.
SliceOptions in_parts(SliceOptions slices, std::int64_t parts);
HeadSlices in_parts(HeadSlices slices, std::int64_t parts);

/// "slices of 3,4,5 in 2 parts"
std::string to_text(const SliceOptions& slices);
/// "slices of 3,4,5 in 2 parts, baseline of 4 slices"
std::string to_text(const SliceOptions& slices, const BaselineOptions& baseline);
std::string to_text(const HeadSlices& slices);

}  // namespace flashoverlap::ops

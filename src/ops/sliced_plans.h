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
  std::string slices;  ///< As text, to tell ranks apart that disagree.
  std::function<OverlapPlan(const PlanOptions&)> overlap;
  std::function<OverlapPlan(const PlanOptions&)> serial;
  std::function<OverlapPlan(const PlanOptions&)> sliced = {};  ///< Empty: no such baseline.
};

/// Chooses the tile where it is open, builds and prepares the plans, and agrees on them with the other ranks.
/// Collective.
PreparedPlans prepare_sliced(Context& context, PlanOptions options, const SlicedRecipe& recipe);

/// Error(kBadArgument) unless num_slices >= 0.
void check_baseline(const BaselineOptions& baseline);

/// "slices of 3,4,5 in 2 parts"
std::string to_text(const SliceOptions& slices);
std::string to_text(const HeadSlices& slices);

}  // namespace flashoverlap::ops

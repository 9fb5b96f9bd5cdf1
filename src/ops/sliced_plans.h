#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "flashoverlap/operators.h"
#include "flashoverlap/slice_choice.h"
#include "ops/operator_state.h"

/// Plans of operators whose data travels in slices rather than in wave groups.
namespace flashoverlap::ops {

struct SlicedRecipe {
  std::string_view operation;
  std::string slices;          ///< As text, to tell ranks apart that disagree.
  SliceCut cut;                ///< As the caller has it; what is 0 is chosen, see SliceOptions.
  bool is_cut_chosen = false;  ///< It has been asked for already.
  /// What the executor is asked about; empty: what all ranks compute.
  std::function<ProductShape(const PlanOptions&)> product = {};
  std::function<OverlapPlan(const PlanOptions&, const SliceCut&)> overlap;
  std::function<OverlapPlan(const PlanOptions&)> serial;
  std::function<OverlapPlan(const PlanOptions&)> sliced = {};  ///< Empty: no such baseline.
};

/// Chooses the tile and the cut where they are open, builds and prepares the plans, and agrees on them with
/// the other ranks. Collective.
PreparedPlans prepare_sliced(Context& context, PlanOptions options, const SlicedRecipe& recipe);

/// Error(kBadArgument) unless num_slices >= 0.
void check_baseline(const BaselineOptions& baseline);

[[nodiscard]] SliceCut cut_of(const SliceOptions& slices);
/// The same slices, cut so.
SliceOptions with_cut(SliceOptions slices, const SliceCut& cut);
HeadSlices with_cut(HeadSlices slices, const SliceCut& cut);

/// Of the rank that has the most rows of A; see HeadSlices. Throws as slice_begins.
[[nodiscard]] ProductShape product_of_rows(const HeadSlices& slices, const PlanOptions& options);

/// "slices of 3,4,5 in 2 parts, 2 at a time"
std::string to_text(const SliceOptions& slices);
/// "slices of 3,4,5 in 2 parts, baseline of 4 slices"
std::string to_text(const SliceOptions& slices, const BaselineOptions& baseline);
std::string to_text(const HeadSlices& slices, const BaselineOptions& baseline);

}  // namespace flashoverlap::ops

#pragma once

#include <string_view>

#include "flashoverlap/plan.h"

namespace flashoverlap::plan {

/// The operations of the plans of a layer of experts.
constexpr std::string_view kMoeDispatch = "moe-dispatch";
constexpr std::string_view kMoeCombine = "moe-combine";

/// The same on all ranks, whatever each has: what else tells such a plan, several weights in its grid, a rank
/// with one expert lacks.
inline bool is_of_experts(const OverlapPlan& plan) {
  return plan.operation == kMoeDispatch || plan.operation == kMoeCombine;
}

}  // namespace flashoverlap::plan

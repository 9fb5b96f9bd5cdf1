#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/operators.h"

namespace flashoverlap {

namespace ops {

/// An operator's plans, one per method, and who carries them out.
struct PreparedPlans {
  Executor* executor = nullptr;
  std::unique_ptr<PreparedPlan> overlap;
  std::unique_ptr<PreparedPlan> serial;
  std::unique_ptr<PreparedPlan> sliced = nullptr;  ///< Null: not asked for.
};

/// The caller's options with this rank's place; what is left open is still 0 or empty.
PlanOptions plan_options(const Context& context, const GemmOptions& options);

/// How to make a plan of one operator.
struct PlanRecipe {
  std::string_view operation;
  TransferKind collective;
  std::function<std::int64_t(const PlanOptions&)> waves;
  std::function<OverlapPlan(const PlanOptions&)> build;
  std::string variant = {};  ///< What else changes the plan, for the tuner: row ownership, routing.
};

/// What the executor makes of the options left open; tile sizes that the caller chose stay. Returns the parts
/// that slices should be cut into; 0: it does not say.
std::int64_t take_suggestion(const Executor& executor, const ProductShape& product, PlanOptions& options);
/// The product that all ranks compute.
template <class Options>
[[nodiscard]] ProductShape product_of(const Options& options) {
  return {.m = options.m, .n = options.n, .k = options.k, .dtype = options.dtype};
}
/// Whether the executor has such suggestions (GPUs): it computes tiles of some sizes only, on units of its
/// own. `options`: GemmOptions or PlanOptions.
template <class Options>
[[nodiscard]] bool has_suggestion(const Context& context, const Options& options) {
  return context.executor().suggest(product_of(options)).has_value();
}

/// Fills in the open options, builds and prepares both plans, and agrees on them with the other ranks.
/// Collective.
PreparedPlans prepare_plans(Context& context, PlanOptions options, const PlanRecipe& recipe);

}  // namespace ops

struct GemmOperator::State {
  ops::PreparedPlans plans;
};

}  // namespace flashoverlap

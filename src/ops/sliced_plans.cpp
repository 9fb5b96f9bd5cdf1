#include "ops/sliced_plans.h"

#include <fmt/ranges.h>

#include <utility>

#include "core/fail.h"
#include "ops/agree.h"
#include "ops/choose.h"
#include "plan/agreement.h"

namespace flashoverlap::ops {

PreparedPlans prepare_sliced(Context& context, PlanOptions options, const SlicedRecipe& recipe) {
  PreparedPlans plans{.executor = &context.executor(), .overlap = nullptr, .serial = nullptr};
  const std::string operation = with_shape(recipe.operation, options.m, options.n, options.k);
  agree(context.communicator(), operation, [&]() -> Ticket {
    take_suggestion(context.executor(), options);
    choose_tile(options);
    plan::AgreementHash agreement;
    const auto prepare = [&](const std::function<OverlapPlan(const PlanOptions&)>& build) {
      OverlapPlan plan = build(options);
      agreement.add(plan.agreement);
      return context.executor().prepare(std::move(plan));
    };
    plans.overlap = prepare(recipe.overlap);
    plans.serial = prepare(recipe.serial);
    if (recipe.sliced) plans.sliced = prepare(recipe.sliced);
    return {.agreement = agreement.value(),
            .description = fmt::format("{} {}, tile {}x{}, swizzle {}, {}, {} threads", operation,
                                       name_of(options.dtype), options.tile_m, options.tile_n,
                                       options.swizzle, recipe.slices, options.resources.compute_units),
            .payload = {}};
  });
  return plans;
}

void check_baseline(const BaselineOptions& baseline) {
  if (baseline.num_slices >= 0) return;
  core::fail(ErrorKind::kBadArgument, "num_slices is {}; it must be at least 1, or 0: no sliced baseline",
             baseline.num_slices);
}

std::string to_text(const SliceOptions& slices) {
  const std::string sizes =
      slices.sizes.empty() ? "equal slices" : fmt::format("slices of {}", fmt::join(slices.sizes, ","));
  return slices.parts == 0 ? sizes : fmt::format("{} in {} parts", sizes, slices.parts);
}

std::string to_text(const HeadSlices& slices) {
  return fmt::format("rows: {}, columns: {}", to_text(slices.rows), to_text(slices.columns));
}

}  // namespace flashoverlap::ops

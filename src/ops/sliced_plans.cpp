#include "ops/sliced_plans.h"

#include <fmt/ranges.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/fail.h"
#include "flashoverlap/call_tuner.h"
#include "ops/agree.h"
#include "ops/choose.h"
#include "plan/agreement.h"

namespace flashoverlap::ops {
namespace {

/// Rank 0's tuner decides for all; without one, and where it knows no better, as the caller has it.
std::int64_t choose_parts(Context& context, const PlanOptions& options, const SlicedRecipe& recipe) {
  const CallTuner* tuner = context.tuner();
  if (recipe.parts != 0 || tuner == nullptr || has_suggestion(context, options)) return recipe.parts;
  Communicator& communicator = context.communicator();
  const std::string operation = with_shape(recipe.operation, options.m, options.n, options.k);
  const std::vector<std::string> all = agree(communicator, operation, [&]() -> Ticket {
    Ticket ticket{.agreement = 0, .description = "choice of the parts of slices", .payload = {}};
    if (communicator.rank() != 0) return ticket;
    PlanOptions chosen = options;
    choose_tile(chosen);
    const PartsRequest request{.operation = operation,
                               .world_size = options.world_size,
                               .plan = [&](std::int32_t rank, std::int64_t parts) {
                                 PlanOptions of_rank = chosen;
                                 of_rank.rank = rank;
                                 return recipe.overlap(of_rank, parts);
                               }};
    const std::optional<PartsChoice> choice = tuner->choose_parts(request);
    ticket.payload = std::to_string(choice ? choice->parts : 0);
    return ticket;
  });
  return std::stoll(all[0]);
}

}  // namespace

PreparedPlans prepare_sliced(Context& context, PlanOptions options, const SlicedRecipe& recipe) {
  PreparedPlans plans{.executor = &context.executor(), .overlap = nullptr, .serial = nullptr};
  const std::string operation = with_shape(recipe.operation, options.m, options.n, options.k);
  const std::int64_t parts = choose_parts(context, options, recipe);
  agree(context.communicator(), operation, [&]() -> Ticket {
    take_suggestion(context.executor(), options);
    choose_tile(options);
    plan::AgreementHash agreement;
    const auto prepare = [&](const std::function<OverlapPlan(const PlanOptions&)>& build) {
      OverlapPlan plan = build(options);
      agreement.add(plan.agreement);
      return context.executor().prepare(std::move(plan));
    };
    plans.overlap = prepare([&](const PlanOptions& chosen) { return recipe.overlap(chosen, parts); });
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

SliceOptions in_parts(SliceOptions slices, std::int64_t parts) {
  slices.parts = parts;
  return slices;
}

HeadSlices in_parts(HeadSlices slices, std::int64_t parts) {
  slices.columns.parts = parts;
  return slices;
}

std::string to_text(const SliceOptions& slices) {
  const std::string sizes =
      slices.sizes.empty() ? "equal slices" : fmt::format("slices of {}", fmt::join(slices.sizes, ","));
  return slices.parts == 0 ? sizes : fmt::format("{} in {} parts", sizes, slices.parts);
}

std::string to_text(const SliceOptions& slices, const BaselineOptions& baseline) {
  if (baseline.num_slices == 0) return to_text(slices);
  return fmt::format("{}, baseline of {} slices", to_text(slices), baseline.num_slices);
}

std::string to_text(const HeadSlices& slices) {
  return fmt::format("rows: {}, columns: {}", to_text(slices.rows), to_text(slices.columns));
}

}  // namespace flashoverlap::ops

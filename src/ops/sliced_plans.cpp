#include "ops/sliced_plans.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
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

using Json = nlohmann::json;

/// Rank 0's tuner decides for all; without one, and where it knows no better, as the caller has it.
SliceCut choose_cut(Context& context, const PlanOptions& options, const SlicedRecipe& recipe) {
  const CallTuner* tuner = context.tuner();
  const bool is_given = recipe.is_cut_chosen || (recipe.cut.parts != 0 && recipe.cut.send_channels != 0);
  if (is_given || tuner == nullptr || has_suggestion(context, options)) return recipe.cut;
  Communicator& communicator = context.communicator();
  const std::string operation = with_shape(recipe.operation, options.m, options.n, options.k);
  const std::vector<std::string> all = agree(communicator, operation, [&]() -> Ticket {
    Ticket ticket{.agreement = 0, .description = "choice of how slices are cut", .payload = {}};
    if (communicator.rank() != 0) return ticket;
    PlanOptions chosen = options;
    choose_tile(chosen);
    const PartsRequest request{.operation = operation,
                               .world_size = options.world_size,
                               .plan =
                                   [&](std::int32_t rank, const SliceCut& cut) {
                                     PlanOptions of_rank = chosen;
                                     of_rank.rank = rank;
                                     return recipe.overlap(of_rank, cut);
                                   },
                               .given = recipe.cut};
    const std::optional<PartsChoice> choice = tuner->choose_parts(request);
    const SliceCut cut = choice ? choice->cut : recipe.cut;
    ticket.payload = Json{{"parts", cut.parts}, {"send_channels", cut.send_channels}}.dump();
    return ticket;
  });
  const Json decision = Json::parse(all[0]);
  return {.parts = decision["parts"], .send_channels = decision["send_channels"]};
}

}  // namespace

PreparedPlans prepare_sliced(Context& context, PlanOptions options, const SlicedRecipe& recipe) {
  PreparedPlans plans{.executor = &context.executor(), .overlap = nullptr, .serial = nullptr};
  const std::string operation = with_shape(recipe.operation, options.m, options.n, options.k);
  SliceCut cut = choose_cut(context, options, recipe);
  agree(context.communicator(), operation, [&]() -> Ticket {
    const ProductShape product = recipe.product ? recipe.product(options) : product_of(options);
    const std::int64_t parts = take_suggestion(context.executor(), product, options);
    if (cut.parts == 0) cut.parts = parts;
    choose_tile(options);
    plan::AgreementHash agreement;
    const auto prepare = [&](const std::function<OverlapPlan(const PlanOptions&)>& build) {
      OverlapPlan plan = build(options);
      agreement.add(plan.agreement);
      return context.executor().prepare(std::move(plan));
    };
    plans.overlap = prepare([&](const PlanOptions& chosen) { return recipe.overlap(chosen, cut); });
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

SliceCut cut_of(const SliceOptions& slices) {
  return {.parts = slices.parts, .send_channels = slices.send_channels};
}

SliceOptions with_cut(SliceOptions slices, const SliceCut& cut) {
  slices.parts = cut.parts;
  slices.send_channels = cut.send_channels;
  return slices;
}

HeadSlices with_cut(HeadSlices slices, const SliceCut& cut) {
  slices.columns = with_cut(std::move(slices.columns), cut);
  return slices;
}

ProductShape product_of_rows(const HeadSlices& slices, const PlanOptions& options) {
  const std::vector<std::int64_t> begins = slice_begins(slices.rows, options.m, options.world_size);
  ProductShape product = product_of(options);
  product.m = 0;
  for (std::size_t r = 1; r < begins.size(); ++r) product.m = std::max(product.m, begins[r] - begins[r - 1]);
  return product;
}

std::string to_text(const SliceOptions& slices) {
  std::string text =
      slices.sizes.empty() ? "equal slices" : fmt::format("slices of {}", fmt::join(slices.sizes, ","));
  if (slices.parts != 0) text += fmt::format(" in {} parts", slices.parts);
  if (slices.send_channels != 0) text += fmt::format(", {} at a time", slices.send_channels);
  return text;
}

std::string to_text(const SliceOptions& slices, const BaselineOptions& baseline) {
  if (baseline.num_slices == 0) return to_text(slices);
  return fmt::format("{}, baseline of {} slices", to_text(slices), baseline.num_slices);
}

std::string to_text(const HeadSlices& slices, const BaselineOptions& baseline) {
  return fmt::format("rows: {}, columns: {}", to_text(slices.rows), to_text(slices.columns, baseline));
}

}  // namespace flashoverlap::ops

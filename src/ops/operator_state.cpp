#include "ops/operator_state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "core/fail.h"
#include "ops/agree.h"
#include "ops/choose.h"
#include "ops/tuned_choice.h"
#include "plan/agreement.h"

namespace flashoverlap::ops {
namespace {

std::string describe(std::string_view operation, const PlanOptions& options) {
  return fmt::format("{} {}, tile {}x{}, swizzle {}, partition {}, {} threads",
                     with_shape(operation, options.m, options.n, options.k), name_of(options.dtype),
                     options.tile_m, options.tile_n, options.swizzle, fmt::join(options.partition, ","),
                     options.resources.compute_units);
}

/// The plan of "no overlap": all waves in one group.
PlanOptions without_overlap(PlanOptions options, std::int64_t waves) {
  options.partition.clear();
  if (waves > 0) options.partition.push_back(waves);
  return options;
}

}  // namespace

std::int64_t take_suggestion(const Executor& executor, const ProductShape& product, PlanOptions& options) {
  const std::optional<PlanShape> shape = executor.suggest(product);
  if (!shape) return 0;
  options.resources = shape->resources;
  if (options.tile_m == 0 && options.tile_n == 0) {
    options.tile_m = shape->tile_m;
    options.tile_n = shape->tile_n;
    if (options.swizzle == 0) options.swizzle = shape->swizzle;
  }
  return shape->slice_parts;
}

PlanOptions plan_options(const Context& context, const GemmOptions& options) {
  return {.rank = context.communicator().rank(),
          .world_size = context.communicator().size(),
          .dtype = options.dtype,
          .m = options.m,
          .n = options.n,
          .k = options.k,
          .tile_m = options.tile_m,
          .tile_n = options.tile_n,
          .swizzle = options.swizzle,
          .resources = {.compute_units = std::max(1, context.num_threads()), .communication_units = 0},
          .partition = options.partition};
}

PreparedPlans prepare_plans(Context& context, PlanOptions options, const PlanRecipe& recipe) {
  PreparedPlans plans{.executor = &context.executor(), .overlap = nullptr, .serial = nullptr};
  const std::string operation = with_shape(recipe.operation, options.m, options.n, options.k);
  const std::int64_t min_group_bytes = has_suggestion(context, options) ? kGpuGroupBytes : 0;
  take_tuned(context, options, recipe);
  agree(context.communicator(), operation, [&]() -> Ticket {
    (void)take_suggestion(context.executor(), product_of(options), options);
    choose_tile(options);
    const std::int64_t waves = recipe.waves(options);
    if (options.partition.empty()) options.partition = open_partition(options, waves, min_group_bytes);
    OverlapPlan overlap = recipe.build(options);
    OverlapPlan serial = recipe.build(without_overlap(options, waves));
    plan::AgreementHash agreement;
    agreement.add(overlap.agreement);
    agreement.add(serial.agreement);
    plans.overlap = context.executor().prepare(std::move(overlap));
    plans.serial = context.executor().prepare(std::move(serial));
    return {
        .agreement = agreement.value(), .description = describe(recipe.operation, options), .payload = {}};
  });
  return plans;
}

}  // namespace flashoverlap::ops

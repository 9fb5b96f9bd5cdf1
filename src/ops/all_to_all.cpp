#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/fail.h"
#include "flashoverlap/operators.h"
#include "ops/agree.h"
#include "ops/operator_state.h"
#include "ops/sliced_plans.h"
#include "plan/agreement.h"

namespace flashoverlap {
namespace {

constexpr std::string_view kOperation = "gemm-all-to-all";

void check_destinations(const GemmOptions& options, std::span<const std::int32_t> destinations,
                        int world_size) {
  if (options.m != std::ssize(destinations)) {
    core::fail(ErrorKind::kBadArgument, "m is {}, but there are {} destinations; each row of A has one",
               options.m, destinations.size());
  }
  for (std::size_t row = 0; row < destinations.size(); ++row) {
    if (destinations[row] >= 0 && destinations[row] < world_size) continue;
    core::fail(ErrorKind::kBadArgument, "destination of row {} is rank {}; it must be in [0, {})", row,
               destinations[row], world_size);
  }
}

std::string to_bytes(std::span<const std::int32_t> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

std::vector<std::int32_t> from_bytes(const std::string& bytes) {
  std::vector<std::int32_t> values(bytes.size() / sizeof(std::int32_t));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(std::int32_t));
  return values;
}

/// Everybody's destinations; every rank plans with all of them.
Routing exchange_routing(Communicator& communicator, const GemmOptions& options,
                         std::span<const std::int32_t> destinations) {
  Routing routing;
  const std::string operation = ops::with_shape(kOperation, options.m, options.n, options.k);
  const auto payloads = ops::agree(communicator, operation, [&]() -> ops::Ticket {
    check_destinations(options, destinations, communicator.size());
    const std::string description =
        fmt::format("{} n={} k={} {}", kOperation, options.n, options.k, name_of(options.dtype));
    plan::AgreementHash agreement;
    agreement.add(std::string_view(description));
    return {.agreement = agreement.value(), .description = description, .payload = to_bytes(destinations)};
  });
  for (const std::string& payload : payloads) routing.destinations.push_back(from_bytes(payload));
  return routing;
}

/// Tells routings apart in the tuning cache.
std::string describe_routing(const Routing& routing) {
  plan::AgreementHash hash;
  for (const auto& rows : routing.destinations) hash.add(std::span<const std::int32_t>(rows));
  return fmt::format("routing {:016x}", hash.value());
}

}  // namespace

GemmAllToAll::GemmAllToAll(Context& context, const GemmOptions& options,
                           std::span<const std::int32_t> destinations) {
  state_ = std::make_unique<State>();
  const Routing routing = exchange_routing(context.communicator(), options, destinations);
  PlanOptions chosen = ops::plan_options(context, options);
  // Tiles, waves and partition are those of the rank with the most rows, so that all ranks come to the same.
  for (const auto& rows : routing.destinations) chosen.m = std::max(chosen.m, std::ssize(rows));
  const ops::PlanRecipe recipe{
      .operation = kOperation,
      .collective = TransferKind::kAllToAll,
      .waves = num_waves,
      .build = [&](const PlanOptions& complete) { return plan_all_to_all(complete, routing); },
      .variant = describe_routing(routing)};
  state_->plans = ops::prepare_plans(context, chosen, recipe);
  for (std::int32_t source = 0; source < chosen.world_size; ++source) {
    rows_from_.push_back(routing.rows(source, chosen.rank));
  }
}

GemmAllToAll::GemmAllToAll(Context& context, const GemmOptions& options, const HeadSlices& slices,
                           const BaselineOptions& baseline) {
  state_ = std::make_unique<State>();
  ops::SlicedRecipe recipe{
      .operation = "gemm-all-to-all-heads",
      .slices = ops::to_text(slices, baseline),
      .cut = ops::cut_of(slices.columns),
      .product = [&](const PlanOptions& chosen) { return ops::product_of_rows(slices, chosen); },
      .overlap =
          [&](const PlanOptions& chosen, const SliceCut& cut) {
            ops::check_baseline(baseline);
            return plan_gemm_all_to_all(chosen, ops::with_cut(slices, cut));
          },
      .serial = [&](const PlanOptions& chosen) { return plan_serial_gemm_all_to_all(chosen, slices); }};
  if (baseline.num_slices > 0) {
    recipe.sliced = [&](const PlanOptions& chosen) {
      return plan_sliced_gemm_all_to_all(chosen, slices, baseline.num_slices);
    };
  }
  state_->plans = ops::prepare_sliced(context, ops::plan_options(context, options), recipe);
  const std::vector<std::int64_t> begins =
      slice_begins(slices.rows, options.m, context.communicator().size());
  for (std::size_t rank = 0; rank + 1 < begins.size(); ++rank) {
    rows_from_.push_back(begins[rank + 1] - begins[rank]);
  }
}

const std::vector<std::int64_t>& GemmAllToAll::rows_from() const {
  return rows_from_;
}

}  // namespace flashoverlap

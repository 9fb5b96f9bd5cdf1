#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "flashoverlap/call_tuner.h"
#include "flashoverlap/operators.h"
#include "ops/agree.h"
#include "ops/choose.h"
#include "ops/sliced_plans.h"
#include "ops/tuned_choice.h"
#include "plan/sliced_call.h"

namespace flashoverlap {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kOperation = "gemm-reduce-scatter";

// The CPU executor has a stream, and so a thread, for each rank that it receives from.
constexpr int kMostTailFreeRanks = 64;

/// A call with nothing left open that decides how it is overlapped.
struct ResolvedCall {
  OverlapMethod method = OverlapMethod::kSignal;
  GemmOptions options;
  SliceOptions slices;
  bool is_cut_chosen = false;
};

/// Not where executors suggest plans (GPUs): there neither way was quicker in all cases (within 4 % on two
/// and four H200s, docs/gpu-cluster.md), and tuned partitions are of signals.
bool tail_free_applies(const Context& context, const GemmOptions& options) {
  return !ops::has_suggestion(context, options) && options.partition.empty() &&
         context.communicator().size() <= kMostTailFreeRanks;
}

ops::PlanRecipe signal_recipe(const SliceOptions& slices) {
  return {.operation = kOperation,
          .collective = TransferKind::kReduceScatter,
          .waves = [=](const PlanOptions& chosen) { return num_waves_reduce_scatter(chosen, slices); },
          .build = [=](const PlanOptions& chosen) { return plan_reduce_scatter(chosen, slices); },
          .variant = slices.sizes.empty() ? std::string(name_of(RowOwnership::kContiguous))
                                          : ops::to_text(SliceOptions{.sizes = slices.sizes})};
}

/// What the context's tuner decides, as text for the other ranks.
std::string decide(const Context& context, const PlanOptions& options, const SliceOptions& slices,
                   std::string_view operation) {
  PlanOptions complete = options;
  ops::choose_tile(complete);
  const PartsRequest in_slices{.operation = std::string(operation),
                               .world_size = options.world_size,
                               .plan =
                                   [&](std::int32_t rank, const SliceCut& cut) {
                                     PlanOptions of_rank = complete;
                                     of_rank.rank = rank;
                                     return plan_tail_free_reduce_scatter(of_rank,
                                                                          ops::with_cut(slices, cut));
                                   },
                               .given = ops::cut_of(slices)};
  const std::optional<OverlapDecision> decision =
      context.tuner()->choose_overlap(ops::open_call(context, options, signal_recipe(slices)), in_slices);
  if (!decision) return "{}";
  return Json{{"tail_free", decision->way == OverlapWay::kTailFree},
              {"parts", decision->cut.parts},
              {"send_channels", decision->cut.send_channels},
              {"tile_m", decision->groups.tile.tile_m},
              {"tile_n", decision->groups.tile.tile_n},
              {"swizzle", decision->groups.tile.swizzle},
              {"partition", decision->groups.partition}}
      .dump();
}

/// Rank 0's tuner decides for all where it can.
ResolvedCall resolve_auto(Context& context, const GemmOptions& options, const SliceOptions& slices) {
  ResolvedCall call{.options = options, .slices = slices};
  if (!tail_free_applies(context, options)) return call;
  call.method = OverlapMethod::kTailFree;
  if (context.tuner() == nullptr) return call;
  const std::string operation = ops::with_shape(kOperation, options.m, options.n, options.k);
  const std::vector<std::string> all = ops::agree(context.communicator(), operation, [&]() -> ops::Ticket {
    ops::Ticket ticket{.agreement = 0, .description = "choice of the way to overlap", .payload = {}};
    if (context.communicator().rank() != 0) return ticket;
    ticket.payload = decide(context, ops::plan_options(context, options), slices, operation);
    return ticket;
  });
  const Json decision = Json::parse(all[0]);
  if (decision.empty()) return call;
  if (decision["tail_free"]) {
    call.slices.parts = decision["parts"];
    call.slices.send_channels = decision["send_channels"];
    call.is_cut_chosen = true;
    return call;
  }
  call.method = OverlapMethod::kSignal;
  call.options.tile_m = decision["tile_m"];
  call.options.tile_n = decision["tile_n"];
  call.options.swizzle = decision["swizzle"];
  call.options.partition = decision["partition"].get<std::vector<std::int64_t>>();
  return call;
}

ops::PreparedPlans prepare_tail_free(Context& context, const ResolvedCall& call,
                                     const BaselineOptions& baseline) {
  const SliceOptions& slices = call.slices;
  ops::SlicedRecipe recipe{
      .operation = kOperation,
      .slices = ops::to_text(slices, baseline),
      .cut = ops::cut_of(slices),
      .is_cut_chosen = call.is_cut_chosen,
      .overlap =
          [=](const PlanOptions& chosen, const SliceCut& cut) {
            ops::check_baseline(baseline);
            return plan_tail_free_reduce_scatter(chosen, ops::with_cut(slices, cut));
          },
      .serial =
          [=](const PlanOptions& chosen) { return plan::plan_reduce_scatter_in_slices(chosen, slices, 1); }};
  if (baseline.num_slices > 0) {
    recipe.sliced = [=](const PlanOptions& chosen) {
      return plan::plan_reduce_scatter_in_slices(chosen, slices, baseline.num_slices);
    };
  }
  return ops::prepare_sliced(context, ops::plan_options(context, call.options), recipe);
}

}  // namespace

std::string_view name_of(OverlapMethod method) {
  switch (method) {
    case OverlapMethod::kSignal:
      return "signal";
    case OverlapMethod::kTailFree:
      return "tail-free";
    case OverlapMethod::kAuto:
      return "auto";
  }
  return "?";
}

GemmReduceScatter::GemmReduceScatter(Context& context, const GemmOptions& options, RowOwnership rows) {
  state_ = std::make_unique<State>();
  const ops::PlanRecipe recipe{
      .operation = kOperation,
      .collective = TransferKind::kReduceScatter,
      .waves = [rows](const PlanOptions& chosen) { return num_waves_reduce_scatter(chosen, rows); },
      .build = [rows](const PlanOptions& chosen) { return plan_reduce_scatter(chosen, rows); },
      .variant = std::string(name_of(rows))};
  state_->plans = ops::prepare_plans(context, ops::plan_options(context, options), recipe);
}

GemmReduceScatter::GemmReduceScatter(Context& context, const GemmOptions& options, OverlapMethod method,
                                     const SliceOptions& slices, const BaselineOptions& baseline) {
  state_ = std::make_unique<State>();
  const ResolvedCall call = method == OverlapMethod::kAuto
                                ? resolve_auto(context, options, slices)
                                : ResolvedCall{.method = method, .options = options, .slices = slices};
  method_ = call.method;
  if (method_ == OverlapMethod::kTailFree) {
    state_->plans = prepare_tail_free(context, call, baseline);
    return;
  }
  state_->plans =
      ops::prepare_plans(context, ops::plan_options(context, call.options), signal_recipe(slices));
  if (baseline.num_slices == 0) return;
  PlanOptions chosen = ops::plan_options(context, options);
  chosen.tile_m = plan().grid.tile_m();
  chosen.tile_n = plan().grid.tile_n();
  chosen.resources = plan().resources;
  ops::choose_tile(chosen);  // The order is left.
  const std::string operation = ops::with_shape(kOperation, options.m, options.n, options.k);
  ops::agree(context.communicator(), operation, [&]() -> ops::Ticket {
    ops::check_baseline(baseline);
    OverlapPlan sliced = plan::plan_reduce_scatter_in_slices(chosen, slices, baseline.num_slices);
    const std::uint64_t agreement = sliced.agreement;
    state_->plans.sliced = context.executor().prepare(std::move(sliced));
    return {.agreement = agreement, .description = "sliced baseline", .payload = {}};
  });
}

}  // namespace flashoverlap

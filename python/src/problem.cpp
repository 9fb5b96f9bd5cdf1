#include "problem.h"

#include <algorithm>
#include <numeric>

#include "core/fail.h"
#include "flashoverlap/partition_search.h"
#include "flashoverlap/predictor.h"
#include "names.h"

namespace flashoverlap::python {
namespace {

// As the CPU executor has it: a stream for each rank that a rank receives from.
constexpr std::int64_t kMostSlicedRanks = 64;

PlanOptions plan_options(const Problem& problem, const MachineProfile& machine) {
  constexpr std::int64_t kTile = 128;
  const DType dtype = parse_dtype(problem.dtype);
  const auto kernel = std::ranges::find(machine.gemm.kernels, dtype, &GemmKernel::dtype);
  const bool known = kernel != machine.gemm.kernels.end();
  const auto or_else = [](std::int64_t asked, std::int64_t otherwise) {
    return asked > 0 ? asked : otherwise;
  };
  return {.world_size = static_cast<std::int32_t>(problem.world_size),
          .dtype = dtype,
          .m = problem.m,
          .n = problem.n,
          .k = problem.k,
          .tile_m = or_else(item_or_zero(problem.tile, 0), known ? kernel->tile_m : kTile),
          .tile_n = or_else(item_or_zero(problem.tile, 1), known ? kernel->tile_n : kTile),
          .swizzle = or_else(item_or_zero(problem.tile, 2), 1),
          .resources = {.compute_units = or_else(problem.units, machine.units)},
          .partition = {}};
}

plan::SlicedCall sliced_call(const Problem& problem) {
  return {.op = *sliced_op(problem),
          .slices = problem.slices,
          .num_slices = std::max<std::int64_t>(1, problem.num_slices)};
}

}  // namespace

std::int64_t item_or_zero(const std::vector<std::int64_t>& list, std::size_t index) {
  return index < list.size() ? list[index] : 0;
}

std::optional<plan::SlicedOp> sliced_op(const Problem& problem) {
  using plan::SlicedOp;
  const std::string& name = problem.operation;
  if (name == "all-gather-gemm") return SlicedOp::kAllGatherGemm;
  if (name == "sharded-weight-gemm") return SlicedOp::kShardedWeight;
  if (name == "gradient-reduce-scatter") return SlicedOp::kGradient;
  if (name == "gemm-all-to-all-heads") return SlicedOp::kHeads;
  if (name == "all-to-all-gemm") return SlicedOp::kFromHeads;
  if (name == "gemm-reduce-scatter" && problem.method == "tail-free") return SlicedOp::kReduceScatter;
  return std::nullopt;
}

void check_world_size(const Problem& problem, std::int64_t most) {
  if (problem.world_size < 1 || problem.world_size > most) {
    core::fail(ErrorKind::kBadArgument, "world_size is {}; expected 1 to {}", problem.world_size, most);
  }
  if (sliced_op(problem) && problem.world_size > kMostSlicedRanks) {
    core::fail(ErrorKind::kBadArgument,
               "world_size is {}; expected 1 to {} for {}, whose slices travel one by one",
               problem.world_size, kMostSlicedRanks, problem.operation);
  }
  if (problem.operation == "gemm-all-to-all" && std::ssize(problem.destinations) != problem.world_size) {
    core::fail(ErrorKind::kBadArgument, "destinations has {} lists; expected one for each of {} ranks",
               problem.destinations.size(), problem.world_size);
  }
}

TuneRequest tune_request(const Problem& problem, const MachineProfile& machine) {
  constexpr std::int64_t kMostRanks = 1 << 20;
  check_world_size(problem, kMostRanks);
  TuneRequest request;
  request.collective = parse_collective(problem.operation);
  request.world_size = problem.world_size;
  request.m = problem.m;
  request.n = problem.n;
  request.k = problem.k;
  request.dtype = parse_dtype(problem.dtype);
  request.rows = parse_rows(problem.rows);
  request.routing.destinations = problem.destinations;
  request.units = problem.units;
  const TileShape asked{item_or_zero(problem.tile, 0), item_or_zero(problem.tile, 1),
                        std::max<std::int64_t>(1, item_or_zero(problem.tile, 2))};
  if (asked.tile_m > 0 && asked.tile_n > 0) {
    request.tiles = {asked};
  } else if (asked.swizzle != 1) {
    for (const GemmKernel& kernel : machine.gemm.kernels) {
      if (kernel.dtype == request.dtype)
        request.tiles.push_back({kernel.tile_m, kernel.tile_n, asked.swizzle});
    }
  }
  return request;
}

/// The tuner's best, with the partition that was asked for in place of its own.
TuneResult tuned(const Problem& problem, const TuneRequest& request, const MachineProfile& machine) {
  TuneResult result = tune_call(request, machine);
  if (problem.partition.empty()) return result;
  TuneChoice& best = result.best;
  best.partition = problem.partition;
  const std::int64_t communicating = best.resources.communication_units;
  const std::int64_t units = request.units == 0 ? machine.units : request.units;
  best.resources = {communicating < units ? units - communicating : units, communicating};
  TuneChoice finest = best;
  finest.partition.assign(static_cast<std::size_t>(std::accumulate(problem.partition.begin(),
                                                                   problem.partition.end(), std::int64_t{0})),
                          1);
  const OverlapCost cost = overlap_cost(plans_for(request, finest), machine);
  best.prediction = predict(cost, problem.partition);
  best.lower_bound_us = lower_bound_us(cost);
  return result;
}

std::vector<OverlapPlan> sliced_plans(const Problem& problem, const MachineProfile& machine,
                                      plan::SlicedPlan which) {
  check_world_size(problem, kMostSlicedRanks);
  PlanOptions options = plan_options(problem, machine);
  std::vector<OverlapPlan> plans;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
    plans.push_back(plan_sliced_call(sliced_call(problem), options, which));
  }
  return plans;
}

PartsChoice choose_parts(const Problem& problem, const MachineProfile& machine) {
  check_world_size(problem, kMostSlicedRanks);
  const PlanOptions options = plan_options(problem, machine);
  return choose_parts({.operation = problem.operation,
                       .world_size = options.world_size,
                       .plan =
                           [&](std::int32_t rank, const SliceCut& cut) {
                             PlanOptions of_rank = options;
                             of_rank.rank = rank;
                             plan::SlicedCall call = sliced_call(problem);
                             for (SliceOptions* slices : {&call.slices.rows, &call.slices.columns}) {
                               slices->parts = cut.parts;
                               slices->send_channels = cut.send_channels;
                             }
                             return plan_sliced_call(call, of_rank, plan::SlicedPlan::kTailFree);
                           },
                       .given = {.parts = 0, .send_channels = problem.slices.rows.send_channels}},
                      machine);
}

}  // namespace flashoverlap::python

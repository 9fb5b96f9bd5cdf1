#include "flashoverlap/tuner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <tuple>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/error.h"
#include "tune/plan_maker.h"

namespace flashoverlap {
namespace {

using tune::PlanMaker;

constexpr std::int64_t kPartitionsPerPair =
    4;  // so that measuring the best K sees more than one partition of a tile

PlanOptions with(PlanOptions options, const TileShape& tile, const Resources& resources) {
  options.tile_m = tile.tile_m;
  options.tile_n = tile.tile_n;
  options.swizzle = tile.swizzle;
  options.resources = resources;
  options.partition.clear();
  return options;
}

/// An uneven all-to-all differs from rank to rank; the others cost the same. `each`: a plan of each rank all
/// the same.
std::vector<OverlapPlan> make_plans(const PlanMaker& maker, const TileShape& tile, const Resources& resources,
                                    const std::vector<std::int64_t>& partition, bool each = false) {
  PlanOptions options = with(maker.call, tile, resources);
  options.partition = partition;
  std::vector<OverlapPlan> plans;
  const std::int32_t count = maker.ranks_are_alike() && !each ? 1 : options.world_size;
  for (options.rank = 0; options.rank < count; ++options.rank) {
    plans.push_back(maker.build(options));
  }
  return plans;
}

OverlapCost cost_of(const PlanMaker& maker, const MachineProfile& machine, const TileShape& tile,
                    const Resources& resources) {
  const std::int64_t waves = maker.waves(with(maker.call, tile, resources));
  return overlap_cost(
      make_plans(maker, tile, resources, std::vector<std::int64_t>(static_cast<std::size_t>(waves), 1)),
      machine);
}

/// A plan's, where `computing` of the machine's units compute.
Resources resources_of(const PlanMaker& maker, const MachineProfile& machine, const TileShape& tile,
                       std::int64_t computing, std::int64_t communicating) {
  return {machine.gemm.compute_units(maker.call.dtype, tile.tile_m, tile.tile_n, computing), communicating};
}

TuneChoice choice(const TileShape& tile, const Resources& resources, PartitionChoice found, double bound_us) {
  return {.tile = tile,
          .resources = resources,
          .partition = std::move(found.partition),
          .prediction = std::move(found.prediction),
          .lower_bound_us = bound_us};
}

/// No overlap: computing and communicating do not share the units, so each gets all that it can use.
TuneChoice serial_choice(const PlanMaker& maker, const MachineProfile& machine, const TileShape& tile,
                         std::int64_t units, const std::vector<std::int64_t>& communication_units) {
  TuneChoice best;
  best.prediction.total_us = std::numeric_limits<double>::infinity();
  for (const std::int64_t communicating : communication_units) {
    const Resources resources = resources_of(maker, machine, tile, units, communicating);
    const OverlapCost cost = cost_of(maker, machine, tile, resources);
    std::vector<std::int64_t> partition;
    if (cost.num_waves() > 0) partition.push_back(cost.num_waves());
    PartitionChoice found{partition, predict(cost, partition)};
    if (found.prediction.total_us < best.prediction.total_us) {
      best = choice(tile, resources, std::move(found), lower_bound_us(cost));
    }
  }
  return best;
}

std::vector<TileShape> candidate_tiles(const TuneRequest& request, const MachineProfile& machine) {
  if (!request.tiles.empty()) return request.tiles;
  std::vector<TileShape> tiles;
  for (const GemmKernel& kernel : machine.gemm.kernels) {
    if (kernel.dtype == request.dtype) tiles.push_back({kernel.tile_m, kernel.tile_n, 1});
  }
  return tiles;
}

void check(const TuneRequest& request, std::int64_t units) {
  if (request.world_size < 1 || request.world_size > std::numeric_limits<std::int32_t>::max()) {
    core::fail(ErrorKind::kBadArgument, "world size is {}, must be at least 1", request.world_size);
  }
  if (units < 1) core::fail(ErrorKind::kBadArgument, "units is {}, must be at least 1", units);
  for (const std::int64_t communicating : request.communication_units) {
    if (communicating < 0 || communicating >= units) {
      core::fail(ErrorKind::kBadArgument, "{} communication units must leave some of the {} units to compute",
                 communicating, units);
    }
  }
}

PlanMaker maker_of(const TuneRequest& request) {
  PlanMaker maker;
  maker.call = {.world_size = static_cast<std::int32_t>(request.world_size),
                .dtype = request.dtype,
                .m = request.m,
                .n = request.n,
                .k = request.k,
                .resources = {},
                .partition = {}};
  maker.collective = request.collective;
  switch (request.collective) {
    case TransferKind::kAllReduce:
      maker.waves = num_waves;
      maker.build = plan_all_reduce;
      return maker;
    case TransferKind::kReduceScatter:
      if (!request.slice_sizes.empty()) {
        const SliceOptions slices{.sizes = request.slice_sizes};
        maker.waves = [=](const PlanOptions& options) { return num_waves_reduce_scatter(options, slices); };
        maker.build = [=](const PlanOptions& options) { return plan_reduce_scatter(options, slices); };
        return maker;
      }
      maker.waves = [&](const PlanOptions& options) {
        return num_waves_reduce_scatter(options, request.rows);
      };
      maker.build = [&](const PlanOptions& options) { return plan_reduce_scatter(options, request.rows); };
      return maker;
    case TransferKind::kAllToAll:
      maker.call.m = 0;
      for (const auto& rows : request.routing.destinations)
        maker.call.m = std::max(maker.call.m, std::ssize(rows));
      maker.waves = num_waves;
      maker.build = [&](const PlanOptions& options) { return plan_all_to_all(options, request.routing); };
      return maker;
    default:
      core::fail(ErrorKind::kBadArgument,
                 "{} cannot be tuned; accepted: all-reduce, reduce-scatter, all-to-all",
                 name_of(request.collective));
  }
}

bool faster(const TuneChoice& a, const TuneChoice& b) {
  return a.prediction.total_us < b.prediction.total_us;
}

}  // namespace

TuneResult tune_call(const TuneRequest& request, const MachineProfile& machine) {
  const std::int64_t units = request.units == 0 ? machine.units : request.units;
  check(request, units);
  std::vector<std::int64_t> communication_units = request.communication_units;
  if (communication_units.empty()) {
    communication_units = machine.communication_unit_choices(request.collective, request.world_size);
  }
  return tune::tune_plans(maker_of(request), units, candidate_tiles(request, machine),
                          std::move(communication_units), machine);
}

TuneResult tune::tune_plans(const PlanMaker& maker, std::int64_t units, const std::vector<TileShape>& tiles,
                            std::vector<std::int64_t> communication_units, const MachineProfile& machine) {
  if (tiles.empty())
    static_cast<void>(machine.gemm.kernel(maker.call.dtype, 1, 1));  // throws, listing the kernels
  std::erase_if(communication_units, [&](std::int64_t communicating) { return communicating >= units; });
  if (communication_units.empty()) communication_units.push_back(0);

  TuneResult result;
  result.serial.prediction.total_us = std::numeric_limits<double>::infinity();
  for (const TileShape& tile : tiles) {
    TuneChoice serial = serial_choice(maker, machine, tile, units, communication_units);
    if (faster(serial, result.serial)) result.serial = serial;
    result.candidates.push_back(std::move(serial));
    for (const std::int64_t communicating : communication_units) {
      const Resources resources = resources_of(maker, machine, tile, units - communicating, communicating);
      const OverlapCost cost = cost_of(maker, machine, tile, resources);
      const double bound_us = lower_bound_us(cost);
      result.candidates.push_back(choice(tile, resources, search_partition(cost), bound_us));
      for (PartitionChoice& other : best_partitions(cost, kPartitionsPerPair)) {
        result.candidates.push_back(choice(tile, resources, std::move(other), bound_us));
      }
      ++result.num_priced;
    }
  }
  std::stable_sort(result.candidates.begin(), result.candidates.end(), faster);
  std::vector<TuneChoice> different;
  for (TuneChoice& candidate : result.candidates) {
    const bool seen = std::any_of(different.begin(), different.end(), [&](const TuneChoice& other) {
      return other.tile == candidate.tile && other.resources == candidate.resources &&
             other.partition == candidate.partition;
    });
    if (!seen) different.push_back(std::move(candidate));
  }
  result.candidates = std::move(different);
  result.best = faster(result.candidates.front(), result.serial) ? result.candidates.front() : result.serial;
  return result;
}

void measure_best(TuneResult& result, std::int64_t count,
                  const std::function<double(const TuneChoice&)>& measure) {
  const auto timed = [&](const TuneChoice& candidate) {
    const double us = measure(candidate);
    if (!(us > 0 && std::isfinite(us))) {
      core::fail(ErrorKind::kBadArgument, "a measured time is {} us, must be finite and > 0", us);
    }
    return us;
  };
  result.serial_measured_us = timed(result.serial);
  result.measured_us = result.serial_measured_us;
  TuneChoice best = result.serial;
  const auto kept =
      std::min(result.candidates.size(), static_cast<std::size_t>(std::max<std::int64_t>(count, 0)));
  for (std::size_t i = 0; i < kept; ++i) {
    const TuneChoice& candidate = result.candidates[i];
    if (candidate.tile == result.serial.tile && candidate.resources == result.serial.resources &&
        candidate.partition == result.serial.partition) {
      continue;
    }
    const double us = timed(candidate);
    if (us < result.measured_us) {
      result.measured_us = us;
      best = candidate;
    }
  }
  result.best = std::move(best);
}

std::vector<OverlapPlan> plans_for(const TuneRequest& request, const TuneChoice& choice) {
  return make_plans(maker_of(request), choice.tile, choice.resources, choice.partition,
                    !request.slice_sizes.empty());
}

}  // namespace flashoverlap

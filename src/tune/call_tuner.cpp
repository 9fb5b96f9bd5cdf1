#include "flashoverlap/call_tuner.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "flashoverlap/error.h"
#include "tune/plan_maker.h"

namespace flashoverlap {
namespace {

/// The caller's tile where there is one, otherwise `otherwise`.
TileShape resolved_tile(const PlanOptions& options, const TileShape& otherwise) {
  return {options.tile_m != 0 ? options.tile_m : otherwise.tile_m,
          options.tile_n != 0 ? options.tile_n : otherwise.tile_n,
          options.swizzle != 0 ? options.swizzle : otherwise.swizzle};
}

bool fits(const PlanOptions& options, const TileShape& tile) {
  return resolved_tile(options, tile) == tile;
}

std::int64_t waves_with(const OpenCall& call, const TileShape& tile) {
  PlanOptions options = call.options;
  options.tile_m = tile.tile_m;
  options.tile_n = tile.tile_n;
  options.swizzle = tile.swizzle;
  return call.waves(options);
}

PlanOptions with_groups(const OpenCall& call, const TunedCall& tuned) {
  PlanOptions options = call.options;
  options.tile_m = tuned.tile.tile_m;
  options.tile_n = tuned.tile.tile_n;
  options.swizzle = tuned.tile.swizzle;
  options.partition = tuned.partition;
  return options;
}

std::vector<std::int64_t> in_one_group(std::int64_t waves) {
  return waves > 0 ? std::vector{waves} : std::vector<std::int64_t>{};
}

/// The same tile, all waves in one group.
TunedCall without_overlap(TunedCall tuned) {
  tuned.partition =
      in_one_group(std::accumulate(tuned.partition.begin(), tuned.partition.end(), std::int64_t{0}));
  tuned.explanation = "one group: no overlap";
  return tuned;
}

/// Whether the profile was measured with the executor that has the call's tiles.
bool knows_tiles(const MachineProfile& machine, const OpenCall& call) {
  const auto& kernels = machine.gemm.kernels;
  return !call.tiles_of_executor ||
         std::any_of(kernels.begin(), kernels.end(), [&](const GemmKernel& kernel) {
           return kernel.dtype == call.options.dtype && kernel.tile_m == call.default_tile.tile_m &&
                  kernel.tile_n == call.default_tile.tile_n;
         });
}

std::int64_t units_per_tile_of(const MachineProfile& machine, const OpenCall& call) {
  return machine.gemm.kernel(call.options.dtype, call.default_tile.tile_m, call.default_tile.tile_n)
      .units_per_tile;
}

/// Units of the machine that the call's compute units and its communication take.
std::int64_t units_of(const MachineProfile& machine, const OpenCall& call) {
  const Resources& resources = call.options.resources;
  return resources.compute_units * units_per_tile_of(machine, call) + resources.communication_units;
}

std::string describe(const std::vector<std::int64_t>& partition) {
  if (partition.size() < 2) return "one group: no overlap";
  return fmt::format("{} groups ({})", partition.size(), fmt::join(partition, ","));
}

}  // namespace

std::string_view name_of(ChoiceOrigin origin) {
  switch (origin) {
    case ChoiceOrigin::kCache:
      return "cache";
    case ChoiceOrigin::kPredicted:
      return "predicted";
    case ChoiceOrigin::kNearest:
      return "nearest";
    case ChoiceOrigin::kDefault:
      return "default";
  }
  return "?";
}

CallTuner::CallTuner(Options options) : options_(std::move(options)) {
  if (options_.cache_path.empty()) return;
  try {
    cache_.emplace(options_.cache_path, options_.identity, options_.warn);
  } catch (const Error& error) {
    if (options_.warn) options_.warn(error.what());  // an unreadable cache must not stop the work
  }
}

TuningKey CallTuner::key_of(const OpenCall& call) const {
  const PlanOptions& o = call.options;
  return {.operation = call.operation,
          .m = o.m,
          .n = o.n,
          .k = o.k,
          .dtype = o.dtype,
          .world_size = o.world_size,
          .units = options_.units > 0 ? options_.units : o.resources.compute_units,
          .epilogue = "any",
          .variant = call.variant,
          .communicator = options_.communicator};
}

TunedCall CallTuner::choose(const OpenCall& call) const {
  TunedCall tuned = decide(call);
  if (options_.on_choice) options_.on_choice(tuned);
  return tuned;
}

std::optional<PartsChoice> CallTuner::choose_parts(const PartsRequest& request) const {
  if (!options_.machine) return std::nullopt;
  static_cast<void>(request.plan(0, request.given));  // what does not hold is not the machine's fault
  try {
    PartsChoice choice = flashoverlap::choose_parts(request, *options_.machine);
    if (options_.on_parts) options_.on_parts(choice);
    return choice;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kBadArgument) throw;
    if (options_.warn) {
      options_.warn(
          fmt::format("{}: parts of slices are not predicted: {}", request.operation, error.what()));
    }
    return std::nullopt;
  }
}

std::optional<OverlapDecision> CallTuner::choose_overlap(const OpenCall& groups,
                                                         const PartsRequest& slices) const {
  static_cast<void>(slices.plan(0, slices.given));  // what does not hold is the caller's error
  std::optional<OverlapDecision> decision;
  if (options_.machine) {
    decision = simulate_overlaps(groups, slices);
  } else if (std::optional<TunedCall> tuned = from_cache(groups)) {
    decision = {.way = OverlapWay::kSignal,
                .groups = *tuned,
                .cut = {},
                .reason = fmt::format("signal: {}; what tail-free takes is not known without a machine "
                                      "profile",
                                      tuned->explanation)};
  }
  if (decision && options_.on_overlap) options_.on_overlap(*decision);
  return decision;
}

std::optional<OverlapDecision> CallTuner::simulate_overlaps(const OpenCall& groups,
                                                            const PartsRequest& slices) const {
  TunedCall tuned = decide(groups);
  const auto plan_with = [&groups](const TunedCall& choice) {
    return [&groups, options = with_groups(groups, choice)](std::int32_t rank) {
      PlanOptions of_rank = options;
      of_rank.rank = rank;
      return groups.build(of_rank);
    };
  };
  try {
    const TunedCall serial = without_overlap(tuned);
    const OverlapRequest request{
        .tail_free = slices, .signal = plan_with(tuned), .serial = plan_with(serial)};
    OverlapChoice choice = flashoverlap::choose_overlap(request, *options_.machine);
    if (choice.way == OverlapWay::kSerial) tuned = serial;
    return OverlapDecision{choice.way, std::move(tuned), choice.parts.cut, std::move(choice.reason)};
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kBadArgument) throw;
    if (options_.warn) {
      options_.warn(fmt::format("{}: ways to overlap are not predicted: {}", slices.operation, error.what()));
    }
    return std::nullopt;
  }
}

TunedCall CallTuner::decide(const OpenCall& call) const {
  if (auto tuned = from_cache(call)) return *tuned;
  if (auto tuned = by_prediction(call)) return *tuned;
  if (auto tuned = from_nearest(call)) return *tuned;
  TunedCall tuned;
  tuned.tile = resolved_tile(call.options, call.default_tile);
  const PlanOptions& o = call.options;
  const std::int64_t waves = waves_with(call, tuned.tile);  // also checks m and n
  tuned.partition = default_partition(waves, o.m * o.n * size_of(o.dtype), call.min_group_bytes);
  tuned.explanation =
      fmt::format("{} by default: nothing is known of this machine (see flashoverlap profile and tune)",
                  describe(tuned.partition));
  return tuned;
}

std::optional<TunedCall> CallTuner::from_cache(const OpenCall& call) const {
  if (!cache_) return std::nullopt;
  const std::optional<TuningEntry> entry = cache_->find(key_of(call));
  if (!entry) return std::nullopt;
  const TileShape tile{entry->tile_m, entry->tile_n, entry->swizzle};
  if (!fits(call.options, tile)) return std::nullopt;  // tuned for another tile than the caller asks for
  const std::int64_t waves = waves_with(call, tile);
  const bool overlaps = entry->partition.size() > 1;
  const auto ignore = [&](const std::string& why) {
    if (options_.warn) {
      options_.warn(fmt::format("{}: entry of {} ignored: {}", cache_->path(), to_text(entry->key), why));
    }
    return std::nullopt;
  };
  const std::int64_t computing = call.options.resources.compute_units;
  if (call.tiles_of_executor && overlaps && entry->resources.compute_units != computing) {
    return ignore(fmt::format("it is for {} compute units beside {} for communication, the call has {}",
                              entry->resources.compute_units, entry->resources.communication_units,
                              computing));
  }
  std::vector<std::int64_t> partition = entry->partition;
  // No overlap is tuned with all units, of which the executor leaves some to communication.
  if (call.tiles_of_executor && !overlaps) partition = in_one_group(waves);
  const auto sum = std::accumulate(partition.begin(), partition.end(), std::int64_t{0});
  if (sum != waves) return ignore(fmt::format("its partition sums to {} waves, the call has {}", sum, waves));
  return TunedCall{
      tile, partition, ChoiceOrigin::kCache,
      fmt::format("{} from the tuning cache ({} on {})", describe(partition), entry->how, entry->date)};
}

std::optional<TunedCall> CallTuner::by_prediction(const OpenCall& call) const {
  if (!options_.machine) return std::nullopt;
  const MachineProfile& machine = *options_.machine;
  if (!knows_tiles(machine, call)) {
    if (options_.warn) {
      options_.warn(
          fmt::format("no prediction for {}: the machine profile {} has no {} kernel of {}x{}, the "
                      "executor's tile",
                      call.operation, machine.name, name_of(call.options.dtype), call.default_tile.tile_m,
                      call.default_tile.tile_n));
    }
    return std::nullopt;
  }
  std::vector<TileShape> tiles;
  if (call.options.tile_m != 0 || call.options.tile_n != 0) {
    tiles.push_back(resolved_tile(call.options, call.default_tile));
  } else {
    for (const GemmKernel& kernel : machine.gemm.kernels) {
      if (kernel.dtype != call.options.dtype) continue;
      // The call's compute units are so large whatever the tile.
      if (call.tiles_of_executor && kernel.units_per_tile != units_per_tile_of(machine, call)) continue;
      tiles.push_back(resolved_tile(call.options, {kernel.tile_m, kernel.tile_n, call.default_tile.swizzle}));
    }
  }
  try {
    const tune::PlanMaker maker{call.options, call.collective, call.waves, call.build};
    const TuneResult result = tune::tune_plans(maker, units_of(machine, call), tiles,
                                               {call.options.resources.communication_units}, machine);
    TunedCall tuned{result.best.tile, result.best.partition, ChoiceOrigin::kPredicted, explain(result)};
    // Priced with all units, but carried out by plans with the call's.
    if (!result.best.overlaps()) tuned.partition = in_one_group(waves_with(call, tuned.tile));
    return tuned;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kBadArgument) throw;
    if (options_.warn) options_.warn(fmt::format("no prediction for {}: {}", call.operation, error.what()));
    return std::nullopt;
  }
}

std::optional<TunedCall> CallTuner::from_nearest(const OpenCall& call) const {
  if (!cache_) return std::nullopt;
  const std::optional<TuningEntry> entry = cache_->nearest(key_of(call));
  if (!entry) return std::nullopt;
  const TileShape tile = resolved_tile(call.options, {entry->tile_m, entry->tile_n, entry->swizzle});
  TunedCall tuned{
      tile, scaled_partition(entry->partition, waves_with(call, tile)), ChoiceOrigin::kNearest, {}};
  tuned.explanation =
      fmt::format("{} after the nearest tuned shape, {}", describe(tuned.partition), to_text(entry->key));
  return tuned;
}

}  // namespace flashoverlap

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flashoverlap/in_process.h"
#include "flashoverlap/machine_profile.h"
#include "flashoverlap/overlap_choice.h"
#include "flashoverlap/slice_choice.h"
#include "flashoverlap/tuner.h"
#include "flashoverlap/tuning_cache.h"

namespace flashoverlap {

/// `machine` with every transfer paced as the in-process communicator paces it: a measured curve takes
/// max(measured, time of its smallest transfer + latency + bytes on the wire / bandwidth), and the topology
/// becomes one level of that link. A bandwidth of 0 leaves bandwidths as they are.
[[nodiscard]] MachineProfile paced(const MachineProfile& machine, const LinkModel& link);

/// Where a call's tile and partition come from.
enum class ChoiceOrigin {
  kCache,      ///< An entry of exactly this call.
  kPredicted,  ///< By the machine profile.
  kNearest,    ///< The entry of the nearest shape, its partition scaled.
  kDefault,    ///< Nothing is known of this machine: default_partition.
};

[[nodiscard]] std::string_view name_of(ChoiceOrigin origin);  ///< "cache", "predicted", "nearest", "default"

/// A call with its tile or partition still open, as operators pass it.
struct OpenCall {
  std::string operation;
  std::string variant;  ///< What else changes the plan: row ownership, routing.
  TransferKind collective = TransferKind::kAllReduce;
  /// Shape, type, world size, units; tile sizes and swizzle where 0 are open.
  PlanOptions options;
  TileShape default_tile;  ///< Where the tile is open and nothing is known.
  std::function<std::int64_t(const PlanOptions&)> waves;
  std::function<OverlapPlan(const PlanOptions&)> build;
  /// The executor (of a GPU) computes tiles of some sizes only, default_tile's among them, on the compute
  /// units in `options.resources`: a machine profile is of use only where it has a kernel of default_tile's
  /// size, and was then measured with such an executor.
  bool tiles_of_executor = false;
  std::int64_t min_group_bytes = 0;  ///< Of the default partition, see default_partition.
};

struct TunedCall {
  TileShape tile;
  std::vector<std::int64_t> partition;  ///< Sums to the call's waves with this tile.
  ChoiceOrigin origin = ChoiceOrigin::kDefault;
  std::string explanation;  ///< One or more lines.
};

/// How a call is overlapped that leaves it open.
struct OverlapDecision {
  OverlapWay way = OverlapWay::kTailFree;
  TunedCall groups;  ///< Signal and serial: tile and partition, of one group where serial.
  SliceCut cut;      ///< Tail-free.
  std::string reason;
};

/// Decides tile and partition of calls: from the tuning cache, by the machine profile, or by default; never
/// fails for want of knowledge. Give it to `Context::set_tuner`: rank 0 then decides for all ranks.
/// Thread-safe.
class CallTuner {
 public:
  struct Options {
    std::optional<MachineProfile> machine;  ///< Nothing is predicted without.
    std::string cache_path;                 ///< Empty: no cache.
    MachineIdentity identity;
    std::string communicator;  ///< Part of the cache key: "in-process 1 GB/s 50 us".
    std::int64_t units =
        0;             ///< Of one rank, where plans' compute units are not all (SMs of a GPU); 0: they are.
    WarningSink warn;  ///< May be null.
    /// Hears of every choice, on the thread that asks; may be null.
    std::function<void(const TunedCall&)> on_choice;
    /// The same for slices; hears nothing where the machine is not known.
    std::function<void(const PartsChoice&)> on_parts;
    /// The same for the way in which a call is overlapped, in place of the others: see choose_overlap.
    std::function<void(const OverlapDecision&)> on_overlap;
  };
  explicit CallTuner(Options options);

  [[nodiscard]] TunedCall choose(const OpenCall& call) const;
  /// How finely the slices of a call should travel, by simulation on the machine profile. Nothing without
  /// one, or where it lacks what the plans need, which is warned of. Throws what request.plan throws.
  [[nodiscard]] std::optional<PartsChoice> choose_parts(const PartsRequest& request) const;
  /// How a call should be overlapped that can be in wave groups (`groups`) and in slices: by simulation on
  /// the machine profile. Without one, in groups where the tuning cache has exactly this call. Nothing where
  /// neither is there, or where the profile lacks what the plans need, which is warned of. Throws what the
  /// builders throw.
  [[nodiscard]] std::optional<OverlapDecision> choose_overlap(const OpenCall& groups,
                                                              const PartsRequest& slices) const;
  /// The cache key of a call.
  [[nodiscard]] TuningKey key_of(const OpenCall& call) const;

 private:
  [[nodiscard]] std::optional<OverlapDecision> simulate_overlaps(const OpenCall& groups,
                                                                 const PartsRequest& slices) const;
  [[nodiscard]] TunedCall decide(const OpenCall& call) const;
  [[nodiscard]] std::optional<TunedCall> from_cache(const OpenCall& call) const;
  [[nodiscard]] std::optional<TunedCall> by_prediction(const OpenCall& call) const;
  [[nodiscard]] std::optional<TunedCall> from_nearest(const OpenCall& call) const;

  Options options_;
  std::optional<TuningCache> cache_;
};

}  // namespace flashoverlap

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/partition_search.h"
#include "flashoverlap/plan.h"
#include "flashoverlap/plan_builders.h"
#include "flashoverlap/predictor.h"

/// Chooses how to carry out a call on a machine, by prediction: tile, units for communication and partition
/// together, with "no overlap" as a candidate like any other.
namespace flashoverlap {

struct TileShape {
  std::int64_t tile_m = 0;
  std::int64_t tile_n = 0;
  std::int64_t swizzle = 1;
  bool operator==(const TileShape&) const = default;
};

/// A call to tune.
struct TuneRequest {
  TransferKind collective = TransferKind::kAllReduce;  ///< kAllReduce, kReduceScatter or kAllToAll.
  std::int64_t world_size = 2;
  std::int64_t m = 0;  ///< All-to-all: ignored, see `routing`.
  std::int64_t n = 0;
  std::int64_t k = 0;
  DType dtype = DType::kFloat32;
  RowOwnership rows = RowOwnership::kContiguous;  ///< Reduce-scatter only.
  std::vector<std::int64_t> slice_sizes;          ///< Reduce-scatter only: of each rank's rows; empty: equal.
  Routing routing;                                ///< All-to-all only; one list per rank.
  std::vector<TileShape> tiles;                   ///< Candidates; empty: the machine's kernels of this dtype.
  std::vector<std::int64_t> communication_units;  ///< Candidates; empty: those of the machine's curves.
  std::int64_t units = 0;                         ///< Of one rank; 0: the machine's.
};

/// One way to carry the call out.
struct TuneChoice {
  TileShape tile;
  Resources resources;
  std::vector<std::int64_t> partition;  ///< Empty for 0 waves.
  Prediction prediction;
  double lower_bound_us = 0;  ///< For this tile and these units: lower_bound_us(cost).
  [[nodiscard]] bool overlaps() const { return partition.size() > 1; }
};

struct TuneResult {
  TuneChoice best;    ///< Never predicted slower than `serial`.
  TuneChoice serial;  ///< The best without overlap: all units compute, then one collective.
  /// The best of each tile and number of communication units, and further partitions where they are few; best
  /// first.
  std::vector<TuneChoice> candidates;
  std::int64_t num_priced = 0;  ///< Pairs of tile and units that were priced.
  double measured_us = 0;       ///< Of `best`, when it was measured; otherwise 0.
  double serial_measured_us = 0;
};

/// Deterministic: the same request and machine give the same result on every rank. Ties go to no overlap,
/// then to the earlier candidate. Throws Error(kBadArgument) for a bad shape, and for what the machine
/// profile lacks.
[[nodiscard]] TuneResult tune_call(const TuneRequest& request, const MachineProfile& machine);

/// Replaces the prediction's order by measurement: measures the `count` best candidates and the serial one
/// with `measure` (us) and takes the fastest. Throws Error(kBadArgument) when a measurement is not finite and
/// > 0.
void measure_best(TuneResult& result, std::int64_t count,
                  const std::function<double(const TuneChoice&)>& measure);

/// Plans of all ranks (all-to-all, or slices of given sizes) or rank 0's (otherwise, where it stands for all)
/// for one choice.
[[nodiscard]] std::vector<OverlapPlan> plans_for(const TuneRequest& request, const TuneChoice& choice);

/// Which was chosen, by how much, and why: a few lines of text.
[[nodiscard]] std::string explain(const TuneResult& result);

}  // namespace flashoverlap

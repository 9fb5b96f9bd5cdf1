#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/plan.h"
#include "flashoverlap/timeline.h"

/// Runs the plans of all ranks on a machine that need not be there: a discrete-event simulation of the very
/// plans that the executors carry out.
///
/// What is modelled. *Computing*: each unit that becomes free takes the next position of the schedule; a tile
/// takes GemmKernel::tile_us; a gated tile holds its unit while it waits. *Groups*: when the last tile is
/// done, `signal_us` later its transfers may start. *Transfers*: in order on their channel; a collective
/// starts when all ranks have come to it, a send when its receive is there (and the other way round), a put
/// at once. *Network*: a collective takes the profile's measured curve or what the topology gives; a message
/// its level's latency and bandwidth. Transfers that share a port share its bandwidth, each in proportion to
/// what it would take alone. *Contention*: while a rank communicates its units compute slower
/// (`slowdown`, `steal_us_per_mib`). *Restore*: one pass over the output at the end.
namespace flashoverlap {

struct SimulationOptions {
  double jitter = 0;       ///< Relative standard deviation of tile and transfer times, in [0, 1].
  std::uint64_t seed = 1;  ///< Of the jitter. The same seed gives the same result, bit for bit.
  /// (rank, factor): this rank's tiles take factor > 0 times as long.
  std::vector<std::pair<std::int64_t, double>> slow_ranks;
  /// Ranks [0, timeline_ranks) go into the timeline; tile by tile, so for many ranks a large one.
  std::int64_t timeline_ranks = 0;
  /// Walk every tile even where nothing can hold one up. The result is the same; for tests.
  bool walk_every_tile = false;
};

/// How one rank fared. Times are from the start of the call.
struct RankSimulation {
  double finish_us = 0;   ///< Output complete.
  double compute_us = 0;  ///< Last tile done.
  double exposed_us = 0;  ///< finish - compute.
  double alone_us = 0;    ///< Last tile done, had nothing been waited for or sent.
  /// What communication adds: finish - restore - alone. Waiting at gates, at either end and in between, what
  /// is left to transfer after the last tile, and what slower computing beside communication costs.
  double exposed_communication_us = 0;
  double communicating_us = 0;      ///< With at least one transfer in flight.
  double idle_fraction = 0;         ///< Of units x compute_us, the part in which units did not compute.
  std::int64_t sent_bytes = 0;      ///< Payload for other ranks (all-reduce: its buffer once).
  std::int64_t received_bytes = 0;  ///< Payload from other ranks.
};

struct SimulationResult {
  double total_us = 0;  ///< The slowest rank's finish.
  std::vector<RankSimulation> ranks;
  std::int64_t num_events = 0;
  /// What the total consists of, the last link first: "rank 0's all-reduce of group 3 (120.0 to 151.2 us)
  /// waits for rank 2's group 3, complete at 118.0 us with wave 5".
  std::vector<std::string> critical_path;
  Timeline timeline;
};

/// plans[r] is rank r's plan. The same plan may stand at several places: its `rank` is not looked at, so that
/// one plan serves for all ranks when only that differs (all-reduce, reduce-scatter), whatever their number.
/// Throws Error(kBadArgument) for no plans, a world size that is not their number, options out of range,
/// transfers that do not match across ranks, a machine that lacks the type or the collective; and for a
/// deadlock, naming for each rank that is stuck what it waits for.
[[nodiscard]] SimulationResult simulate(std::span<const OverlapPlan* const> plans,
                                        const MachineProfile& machine, const SimulationOptions& options = {});
[[nodiscard]] SimulationResult simulate(std::span<const OverlapPlan> plans, const MachineProfile& machine,
                                        const SimulationOptions& options = {});
/// All plan.world_size ranks run `plan`.
[[nodiscard]] SimulationResult simulate_symmetric(const OverlapPlan& plan, const MachineProfile& machine,
                                                  const SimulationOptions& options = {});

}  // namespace flashoverlap

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "flashoverlap/machine_profile.h"

/// What the levels of a machine's network mean for a group of `world_size` consecutive ranks.
namespace flashoverlap::sim {

/// One level as `world_size` ranks use it.
struct LevelUse {
  std::int64_t inner_ranks = 1;  ///< Ranks of one inner domain, at most world_size.
  std::int64_t fan_out = 1;      ///< Inner domains of one domain; 1: the level is not crossed.
  std::int64_t ports = 1;        ///< Ports of one inner domain.
  double latency_us = 0;         ///< With latency_grows applied.
  double us_per_byte = 0;        ///< Of one port.
};

/// Throws Error(kBadArgument) when there are no levels or they hold fewer than `world_size` ranks.
std::vector<LevelUse> level_uses(std::span<const TopologyLevel> levels, std::int64_t world_size,
                                 const std::string& machine);

/// Time of a collective on an otherwise idle network: the sum of the crossed levels' latencies, and the
/// slowest level's bytes on the wire over its bandwidth (the levels work in a pipeline). Bytes on the wire
/// per rank are those of `LinkModel`, with hierarchical all-reduce, reduce-scatter and all-gather: each level
/// works on the share that the inner levels leave.
struct CollectiveCost {
  double latency_us = 0;
  double us_per_byte = 0;  ///< Per byte of the whole buffer.
};
CollectiveCost collective_cost(TransferKind collective, std::span<const LevelUse> levels,
                               std::int64_t world_size);

/// The part of `level`'s port time in the collective's, per byte of the whole buffer.
double wire_us_per_byte(TransferKind collective, std::span<const LevelUse> levels, std::size_t level,
                        std::int64_t world_size);

/// The level that a message between two different ranks crosses: the innermost whose domain holds both.
std::size_t level_between(std::span<const TopologyLevel> levels, std::int64_t a, std::int64_t b);

}  // namespace flashoverlap::sim

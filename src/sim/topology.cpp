#include "sim/topology.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/fail.h"

namespace flashoverlap::sim {
namespace {

constexpr double kBytesPerUsAtOneGbps = 1e3;

std::int64_t capacity(const TopologyLevel& level) {
  return level.ranks == 0 ? std::numeric_limits<std::int64_t>::max() : level.ranks;
}

/// Rounds of a tree that joins `count` domains.
double rounds(std::int64_t count) {
  double result = 0;
  for (std::int64_t reached = 1; reached < count; reached *= 2) ++result;
  return result;
}

}  // namespace

std::vector<LevelUse> level_uses(std::span<const TopologyLevel> levels, std::int64_t world_size,
                                 const std::string& machine) {
  if (levels.empty()) {
    core::fail(ErrorKind::kBadArgument, "machine '{}' has no topology levels", machine);
  }
  if (capacity(levels.back()) < world_size) {
    core::fail(ErrorKind::kBadArgument, "machine '{}' has at most {} ranks, {} were asked for", machine,
               levels.back().ranks, world_size);
  }
  std::vector<LevelUse> uses;
  std::int64_t inner = 1;
  for (const TopologyLevel& level : levels) {
    LevelUse use;
    use.inner_ranks = std::min(inner, world_size);
    const std::int64_t ranks = std::min(capacity(level), world_size);
    use.fan_out = (ranks + use.inner_ranks - 1) / use.inner_ranks;
    use.ports = level.ports == 0 ? use.inner_ranks : std::min(level.ports, use.inner_ranks);
    use.latency_us = level.latency_us * (level.latency_grows ? rounds(use.fan_out) : 1);
    use.us_per_byte = 1 / (level.bandwidth_gbps * kBytesPerUsAtOneGbps);
    uses.push_back(use);
    inner = ranks;
  }
  return uses;
}

double wire_us_per_byte(TransferKind collective, std::span<const LevelUse> levels, std::size_t level,
                        std::int64_t world_size) {
  const LevelUse& use = levels[level];
  if (use.fan_out < 2) return 0;
  const auto fan_out = static_cast<double>(use.fan_out);
  const double ranks_per_port = static_cast<double>(use.inner_ranks) / static_cast<double>(use.ports);
  const double port_us_per_byte = ranks_per_port * use.us_per_byte;
  // A rank's share of the buffer at this level: the inner levels have scattered it over inner_ranks.
  const double share = 1 / static_cast<double>(use.inner_ranks);
  switch (collective) {
    case TransferKind::kAllReduce:
      return 2 * (fan_out - 1) / fan_out * share * port_us_per_byte;
    case TransferKind::kReduceScatter:
    case TransferKind::kAllGather:
      return (fan_out - 1) / fan_out * share * port_us_per_byte;
    case TransferKind::kAllToAll: {
      const auto world = static_cast<double>(world_size);
      const double reached = std::min(static_cast<double>(use.inner_ranks) * fan_out, world);
      return (reached - static_cast<double>(use.inner_ranks)) / world * port_us_per_byte;
    }
    case TransferKind::kSend:
    case TransferKind::kReceive:
    case TransferKind::kPut:
      return use.us_per_byte;
  }
  return 0;
}

CollectiveCost collective_cost(TransferKind collective, std::span<const LevelUse> levels,
                               std::int64_t world_size) {
  CollectiveCost cost;
  for (std::size_t level = 0; level < levels.size(); ++level) {
    if (levels[level].fan_out < 2) continue;
    cost.latency_us += levels[level].latency_us;
    cost.us_per_byte = std::max(cost.us_per_byte, wire_us_per_byte(collective, levels, level, world_size));
  }
  return cost;
}

std::size_t level_between(std::span<const TopologyLevel> levels, std::int64_t a, std::int64_t b) {
  for (std::size_t level = 0; level < levels.size(); ++level) {
    const std::int64_t ranks = capacity(levels[level]);
    if (a / ranks == b / ranks) return level;
  }
  return levels.size() - 1;
}

}  // namespace flashoverlap::sim

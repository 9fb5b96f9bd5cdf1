#include "flashoverlap/partition_search.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/error.h"
#include "tune/cost_check.h"
#include "tune/tick_cost.h"

namespace flashoverlap {
namespace {

using tune::TickCost;
using tune::Ticks;

constexpr Ticks kNever = std::numeric_limits<Ticks>::infinity();

/// min over j in [begin, end) of max(finish[j], ready) + row[j], on independent lanes: a chain of scalar
/// minima would wait for each one's latency.
Ticks best_continuation(const Ticks* finish, const Ticks* row, std::size_t begin, std::size_t end,
                        Ticks ready) {
  constexpr std::size_t kLanes = 8;
  std::array<Ticks, kLanes> best;
  best.fill(kNever);
  std::size_t j = begin;
  for (; j + kLanes <= end; j += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const Ticks start = finish[j + lane] > ready ? finish[j + lane] : ready;
      const Ticks value = start + row[j + lane];
      best[lane] = value < best[lane] ? value : best[lane];
    }
  }
  for (; j < end; ++j) best[0] = std::min(best[0], std::max(finish[j], ready) + row[j]);
  return *std::min_element(best.begin(), best.end());
}

/// F(0..T) of the recurrence, with the whole in two or more groups; F(T) is infinite for T < 2.
std::vector<Ticks> best_finishes(TickCost& cost) {
  const std::size_t n = cost.waves();
  std::vector<Ticks> finish(n + 1, kNever);
  finish[0] = 0;
  std::size_t waiting = 0;  // the last j whose communication is over before the group is ready
  for (std::size_t i = 1; i <= n; ++i) {
    const Ticks ready = cost.ready(i);
    while (waiting + 1 < i && finish[waiting + 1] <= ready) ++waiting;
    // F does not fall with j and transfers do not grow with it, so no j before `waiting` is better than
    // `waiting`.
    const std::size_t first = i == n ? std::max<std::size_t>(waiting, 1) : waiting;
    finish[i] = best_continuation(finish.data(), cost.row(i), first, i, ready);
  }
  return finish;
}

/// Of all partitions into two or more groups that finish at F(T): the one with the largest last group, and so
/// on.
std::vector<std::int64_t> trace_back(TickCost& cost, const std::vector<Ticks>& finish) {
  std::vector<std::int64_t> partition;
  Ticks deadline = finish.back();
  for (std::size_t i = cost.waves(); i > 0;) {
    const Ticks* row = cost.row(i);
    const Ticks ready = cost.ready(i);
    std::size_t chosen = i - 1;
    Ticks chosen_value = kNever;
    for (std::size_t j = i == cost.waves() ? 1 : 0; j < i; ++j) {
      const Ticks value = std::max(finish[j], ready) + row[j];
      if (value < chosen_value) {
        chosen = j;
        chosen_value = value;
      }
      if (value <= deadline) break;
    }
    partition.push_back(static_cast<std::int64_t>(i - chosen));
    deadline -= row[chosen];
    i = chosen;
  }
  std::reverse(partition.begin(), partition.end());
  return partition;
}

PartitionChoice choice_of(const OverlapCost& cost, std::vector<std::int64_t> partition) {
  PartitionChoice choice;
  choice.prediction = predict(cost, partition);
  choice.partition = std::move(partition);
  return choice;
}

std::vector<std::int64_t> search_exactly(const OverlapCost& cost) {
  if (cost.num_waves() == 0) return {};
  TickCost ticks(cost);
  const std::vector<Ticks> finish = best_finishes(ticks);
  if (ticks.single_total() <= finish.back() + ticks.restore()) return {cost.num_waves()};
  return trace_back(ticks, finish);
}

/// Joins `block` neighbouring waves each.
OverlapCost join_waves(const OverlapCost& cost, std::int64_t block) {
  OverlapCost joined = cost;
  joined.finish_us.clear();
  joined.bytes.clear();
  const auto waves = static_cast<std::size_t>(cost.num_waves());
  for (std::size_t begin = 0; begin < waves; begin += static_cast<std::size_t>(block)) {
    const std::size_t end = std::min(begin + static_cast<std::size_t>(block), waves);
    joined.finish_us.push_back(cost.finish_us[end - 1]);
    std::int64_t bytes = 0;
    for (std::size_t wave = begin; wave < end; ++wave) bytes += cost.bytes[wave];
    joined.bytes.push_back(bytes);
  }
  return joined;
}

/// Bit w of the mask: a group ends after wave w. Ascending masks are the tie order of the header: the highest
/// bit is where the last group begins.
std::vector<std::int64_t> partition_of(std::uint64_t mask, std::int64_t waves) {
  std::vector<std::int64_t> partition;
  std::int64_t begin = 0;
  for (std::int64_t wave = 0; wave < waves; ++wave) {
    if (wave + 1 < waves && ((mask >> wave) & 1U) == 0) continue;
    partition.push_back(wave + 1 - begin);
    begin = wave + 1;
  }
  return partition;
}

Ticks total_of(const TickCost& cost, std::uint64_t mask) {
  if (mask == 0) return cost.single_total();
  const std::size_t waves = cost.waves();
  Ticks finish = 0;
  std::size_t begin = 0;
  for (std::size_t i = 1; i <= waves; ++i) {
    if (i < waves && ((mask >> (i - 1)) & 1U) == 0) continue;
    finish = std::max(finish, cost.ready(i)) + cost.transfer(begin, i);
    begin = i;
  }
  return finish + cost.restore();
}

/// The best of exactly g groups, for g = 1..most: the same recurrence with the number of groups as a second
/// index.
std::vector<std::vector<std::int64_t>> best_by_groups(const OverlapCost& cost, std::size_t most) {
  TickCost ticks(cost);
  const std::size_t n = ticks.waves();
  most = std::min(most, n);
  std::vector<std::vector<Ticks>> finish(most + 1, std::vector<Ticks>(n + 1, kNever));
  std::vector<std::vector<std::size_t>> from(most + 1, std::vector<std::size_t>(n + 1, 0));
  finish[0][0] = 0;
  for (std::size_t i = 1; i <= n; ++i) {
    const Ticks* row = ticks.row(i);
    for (std::size_t groups = 1; groups <= std::min(most, i); ++groups) {
      for (std::size_t j = groups - 1; j < i; ++j) {
        const Ticks value = std::max(finish[groups - 1][j], ticks.ready(i)) + row[j];
        if (value < finish[groups][i]) {
          finish[groups][i] = value;
          from[groups][i] = j;
        }
      }
    }
  }
  std::vector<std::vector<std::int64_t>> partitions;
  for (std::size_t groups = 1; groups <= most; ++groups) {
    std::vector<std::int64_t> partition;
    std::size_t i = n;
    for (std::size_t g = groups; g > 0; --g) {
      partition.push_back(static_cast<std::int64_t>(i - from[g][i]));
      i = from[g][i];
    }
    std::reverse(partition.begin(), partition.end());
    partitions.push_back(std::move(partition));
  }
  return partitions;
}

void widen(std::vector<std::int64_t>& partition, std::int64_t block, std::int64_t waves) {
  std::int64_t total = 0;
  for (std::int64_t& group : partition) {
    group = std::min(group * block, waves - total);
    total += group;
  }
}

std::int64_t block_size(std::int64_t waves, std::int64_t most) {
  return (waves + most - 1) / most;
}

}  // namespace

PartitionChoice search_exhaustively(const OverlapCost& cost) {
  tune::require(cost);
  const std::int64_t waves = cost.num_waves();
  if (waves > kMaxExhaustiveWaves) {
    core::fail(ErrorKind::kBadArgument,
               "{} waves have 2^{} partitions; the exhaustive search takes at most {} waves", waves,
               waves - 1, kMaxExhaustiveWaves);
  }
  if (waves == 0) return {};
  const TickCost ticks(cost);
  std::uint64_t best = 0;
  Ticks best_total = ticks.single_total();
  for (std::uint64_t mask = 1; mask < std::uint64_t{1} << (waves - 1); ++mask) {
    const Ticks total = total_of(ticks, mask);
    if (total < best_total) {
      best = mask;
      best_total = total;
    }
  }
  return choice_of(cost, partition_of(best, waves));
}

PartitionChoice search_partition(const OverlapCost& cost) {
  tune::require(cost);
  const std::int64_t waves = cost.num_waves();
  if (waves <= kMaxSearchWaves) return choice_of(cost, search_exactly(cost));
  const std::int64_t block = block_size(waves, kMaxSearchWaves);
  std::vector<std::int64_t> partition = search_exactly(join_waves(cost, block));
  widen(partition, block, waves);
  return choice_of(cost, std::move(partition));
}

std::vector<PartitionChoice> best_partitions(const OverlapCost& cost, std::int64_t count) {
  constexpr std::int64_t kMaxAllPartitions = 16;
  constexpr std::size_t kMostGroups = 16;
  constexpr std::int64_t kMaxGroupedWaves = 1024;  // 16 layers of the O(T^2) recurrence
  tune::require(cost);
  const std::int64_t waves = cost.num_waves();
  if (count < 1) core::fail(ErrorKind::kBadArgument, "{} best partitions were asked for, at least 1", count);
  if (waves == 0) return {PartitionChoice{}};
  std::vector<std::vector<std::int64_t>> candidates;
  if (waves <= kMaxAllPartitions) {
    const TickCost ticks(cost);
    std::vector<std::pair<Ticks, std::uint64_t>> totals;
    for (std::uint64_t mask = 0; mask < std::uint64_t{1} << (waves - 1); ++mask) {
      totals.emplace_back(total_of(ticks, mask), mask);
    }
    const auto kept = std::min(totals.size(), static_cast<std::size_t>(count));
    std::partial_sort(totals.begin(), totals.begin() + static_cast<std::ptrdiff_t>(kept), totals.end());
    for (std::size_t i = 0; i < kept; ++i) candidates.push_back(partition_of(totals[i].second, waves));
  } else {
    const std::int64_t block = block_size(waves, kMaxGroupedWaves);
    candidates = best_by_groups(block == 1 ? cost : join_waves(cost, block), kMostGroups);
    for (std::vector<std::int64_t>& partition : candidates) widen(partition, block, waves);
    candidates.push_back(search_partition(cost).partition);
  }
  std::vector<PartitionChoice> choices;
  for (std::vector<std::int64_t>& partition : candidates)
    choices.push_back(choice_of(cost, std::move(partition)));
  std::stable_sort(choices.begin(), choices.end(), [](const PartitionChoice& a, const PartitionChoice& b) {
    return std::pair(a.prediction.total_us, a.partition.size()) <
           std::pair(b.prediction.total_us, b.partition.size());
  });
  choices.erase(std::unique(choices.begin(), choices.end(),
                            [](const auto& a, const auto& b) { return a.partition == b.partition; }),
                choices.end());
  if (choices.size() > static_cast<std::size_t>(count)) choices.resize(static_cast<std::size_t>(count));
  return choices;
}

}  // namespace flashoverlap

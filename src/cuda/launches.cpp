#include "launches.h"

#include <algorithm>

namespace flashoverlap::cuda {
namespace {

std::size_t as_index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// By position: arrivals before all that the tile reads and adds is there.
std::vector<std::uint32_t> needed_arrivals(const OverlapPlan& plan, const GateTables& tables) {
  std::vector<std::uint32_t> needed(plan.schedule.size(), 0);
  for (std::size_t p = 0; p < needed.size(); ++p) {
    if (!tables.finish.empty()) needed[p] = tables.finish[p];
    if (tables.start.empty()) continue;
    const auto first = tables.start.begin() + static_cast<std::int64_t>(p) * tables.blocks;
    needed[p] = *std::max_element(first, first + tables.blocks);
  }
  return needed;
}

/// By position: the group that ends there and that a transfer follows; -1: none does.
std::vector<std::int64_t> awaited_group_ends(const OverlapPlan& plan) {
  std::vector<std::int64_t> ends(plan.schedule.size(), -1);
  for (const Transfer& transfer : plan.transfers) {
    if (transfer.trigger.kind != TriggerKind::kGroup) continue;
    const WaveGroup& group = plan.groups[as_index(transfer.trigger.index)];
    if (group.num_tiles > 0)
      ends[as_index(group.first_position + group.num_tiles - 1)] = transfer.trigger.index;
  }
  return ends;
}

/// Adjacent runs become one.
std::vector<plan::RowRun> joined(std::vector<plan::RowRun> runs) {
  std::ranges::sort(runs, {}, &plan::RowRun::first);
  std::vector<plan::RowRun> joined;
  for (const plan::RowRun& run : runs) {
    if (!joined.empty() && joined.back().first + joined.back().count == run.first) {
      joined.back().count += run.count;
    } else {
      joined.push_back(run);
    }
  }
  return joined;
}

}  // namespace

std::vector<LaunchRange> launch_ranges(const OverlapPlan& plan, const GateTables& tables, Cut cut) {
  const std::int64_t positions = std::ssize(plan.schedule);
  if (positions == 0) return {};
  if (cut == Cut::kNowhere) return {{.first = 0, .count = positions}};
  const std::vector<std::int64_t> ends = awaited_group_ends(plan);
  std::vector<std::uint32_t> needed(plan.schedule.size(), 0);
  if (cut == Cut::kGroupsAndArrivals) needed = needed_arrivals(plan, tables);
  std::vector<LaunchRange> ranges{{.first = 0, .count = 0, .arrivals = needed.front()}};
  for (std::int64_t p = 0; p < positions; ++p) {
    const LaunchRange& last = ranges.back();
    const std::uint32_t arrivals = std::max(last.arrivals, needed[as_index(p)]);
    if (last.count > 0 && (last.group >= 0 || arrivals > last.arrivals))
      ranges.push_back({.first = p, .count = 0, .arrivals = arrivals});
    ++ranges.back().count;
    ranges.back().group = ends[as_index(p)];
  }
  return ranges;
}

std::vector<std::vector<plan::RowRun>> rows_of_launches(const OverlapPlan& plan,
                                                        std::span<const LaunchRange> launches) {
  const plan::RowRuns runs(plan);
  std::vector<bool> is_made(as_index(runs.size()), false);
  std::vector<std::vector<plan::RowRun>> rows;
  for (const LaunchRange& launch : launches) {
    std::vector<plan::RowRun> own;
    for (std::int64_t p = launch.first; p < launch.first + launch.count; ++p) {
      const std::int64_t run = runs.of_tile(plan.schedule[as_index(p)]);
      if (!is_made[as_index(run)]) own.push_back(runs.at(run));
      is_made[as_index(run)] = true;
    }
    rows.push_back(joined(std::move(own)));
  }
  return rows;
}

}  // namespace flashoverlap::cuda

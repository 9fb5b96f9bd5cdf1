/// Into which launches a GPU's GEMM is cut: every tile in one, in the order of the schedule, and none before
/// what it needs.
#include "cuda/launches.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "flashoverlap/plan_builders.h"
#include "small_product.h"
#include "support/seed.h"

namespace flashoverlap::cuda {
namespace {

constexpr Cut kCuts[] = {Cut::kNowhere, Cut::kGroups, Cut::kGroupsAndArrivals};

GateTables tables_of(const OverlapPlan& plan) {
  return gate_tables(plan, transfer_steps(plan));
}

std::vector<LaunchRange> decomposed(const OverlapPlan& plan) {
  return launch_ranges(plan, tables_of(plan), Cut::kGroupsAndArrivals);
}

using Ranges = std::vector<LaunchRange>;

// Three ranks, slices of two rows of two tiles: the own one waits for nothing.
TEST(Launches, OneForEachSliceThatArrives) {
  const OverlapPlan plan =
      plan_all_gather_gemm(test::small_product(3, 3 * 32, 48, 8), {.sizes = {}, .parts = 1});
  EXPECT_EQ(decomposed(plan), (Ranges{{.first = 0, .count = 4, .arrivals = 0, .group = -1},
                                      {.first = 4, .count = 4, .arrivals = 1, .group = -1},
                                      {.first = 8, .count = 4, .arrivals = 2, .group = -1}}));
  EXPECT_EQ(launch_ranges(plan, tables_of(plan), Cut::kGroups), (Ranges{{.first = 0, .count = 12}}));
}

// The same, where slices leave: the own one, which adds what has arrived, comes last.
TEST(Launches, OneForEachSliceThatLeaves) {
  const OverlapPlan plan =
      plan_tail_free_reduce_scatter(test::small_product(3, 3 * 32, 48, 8), {.sizes = {}, .parts = 1});
  EXPECT_EQ(decomposed(plan), (Ranges{{.first = 0, .count = 4, .arrivals = 0, .group = 0},
                                      {.first = 4, .count = 4, .arrivals = 0, .group = 1},
                                      {.first = 8, .count = 4, .arrivals = 2, .group = -1}}));
  // Tiles that wait themselves need no cut where they begin to.
  for (const LaunchRange& range : launch_ranges(plan, tables_of(plan), Cut::kGroups))
    EXPECT_EQ(range.arrivals, 0);
}

// Two strips of rows, of which each tile takes the columns of three ranks.
TEST(Launches, BlocksCountAsTheLastOfThem) {
  const HeadSlices heads{.rows = {}, .columns = {.sizes = {}, .parts = 2}};
  const OverlapPlan plan = plan_all_to_all_gemm(test::small_product(3, 3 * 32, 48, 24), heads);
  EXPECT_EQ(decomposed(plan), (Ranges{{.first = 0, .count = 2, .arrivals = 2, .group = -1},
                                      {.first = 2, .count = 2, .arrivals = 4, .group = -1}}));
}

TEST(Launches, NoneOfNoTile) {
  const OverlapPlan plan = plan_all_gather_gemm(test::small_product(2, 0, 48, 8), {});
  for (const Cut cut : kCuts) EXPECT_EQ(launch_ranges(plan, tables_of(plan), cut), Ranges{});
}

// Rank 0 of three makes the rows of ranks 1 and 2, then its own: those of a slice in one go.
TEST(Launches, RowsOfEachInOneRun) {
  const OverlapPlan plan =
      plan_tail_free_reduce_scatter(test::small_product(3, 3 * 32, 48, 8), {.sizes = {}, .parts = 1});
  const Ranges ranges = decomposed(plan);
  EXPECT_EQ(rows_of_launches(plan, ranges),
            (std::vector<std::vector<plan::RowRun>>{{{32, 32}}, {{64, 32}}, {{0, 32}}}));
}

/// Straight from the plan's gates and transfers.
void expect_holds(const OverlapPlan& plan, Cut cut) {
  const std::vector<TransferStep> steps = transfer_steps(plan);
  const Ranges ranges = launch_ranges(plan, gate_tables(plan, steps), cut);
  std::vector<std::uint32_t> arrival_of(plan.slices.size(), 0);
  for (const TransferStep& step : steps) {
    const std::int64_t brings = step.collective >= 0 ? step.collective : step.receive;
    if (step.brings_slice)
      arrival_of[static_cast<std::size_t>(plan.transfers[static_cast<std::size_t>(brings)].slice)] =
          step.arrivals;
  }
  std::int64_t next = 0;
  std::uint32_t arrivals = 0;
  for (const LaunchRange& range : ranges) {
    EXPECT_EQ(range.first, next);
    EXPECT_GT(range.count, 0);
    EXPECT_GE(range.arrivals, arrivals);
    next += range.count;
    arrivals = range.arrivals;
    for (const Gate& gate : plan.gates) {
      const auto at = std::ranges::find(plan.schedule, gate.tile) - plan.schedule.begin();
      if (cut != Cut::kGroupsAndArrivals || at < range.first || at >= next) continue;
      EXPECT_LE(arrival_of[static_cast<std::size_t>(gate.slice)], range.arrivals);
    }
  }
  EXPECT_EQ(next, std::ssize(plan.schedule));
  for (const Transfer& transfer : plan.transfers) {
    if (transfer.trigger.kind != TriggerKind::kGroup || cut == Cut::kNowhere) continue;
    const WaveGroup& group = plan.groups[static_cast<std::size_t>(transfer.trigger.index)];
    if (group.num_tiles == 0) continue;
    const auto last = std::ranges::find(ranges, transfer.trigger.index, &LaunchRange::group);
    ASSERT_NE(last, ranges.end());
    EXPECT_EQ(last->first + last->count, group.first_position + group.num_tiles);
    EXPECT_EQ(last->arrivals, 0U) << "it is enqueued before the transfers";
  }
}

class RandomLaunches : public test::SeededTest {};

TEST_F(RandomLaunches, HoldForEveryPlan) {
  for (int i = 0; i < 200; ++i) {
    PlanOptions options =
        test::small_product(static_cast<std::int32_t>(pick(1, 6)), pick(0, 300), pick(0, 150), pick(0, 60));
    options.rank = static_cast<std::int32_t>(pick(0, options.world_size - 1));
    const SliceOptions slices{.sizes = {}, .parts = pick(0, 3)};
    const HeadSlices heads{.rows = {}, .columns = slices};
    const std::int64_t kind = pick(0, 5);
    const auto build = [&] {
      switch (kind) {
        case 0:
          return plan_all_gather_gemm(options, slices, SliceAxis::kRows);
        case 1:
          return plan_all_gather_gemm(options, slices, SliceAxis::kColumns);
        case 2:
          return plan_tail_free_reduce_scatter(options, slices);
        case 3:
          return plan_gemm_all_to_all(options, heads);
        case 4:
          return plan_all_to_all_gemm(options, heads);
        default:
          return plan_all_reduce(options);
      }
    };
    SCOPED_TRACE(fmt::format("kind {}, rank {} of {}, m={} n={} k={}, {} parts", kind, options.rank,
                             options.world_size, options.m, options.n, options.k, slices.parts));
    const OverlapPlan plan = build();
    for (const Cut cut : kCuts) expect_holds(plan, cut);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace flashoverlap::cuda

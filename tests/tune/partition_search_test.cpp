#include "flashoverlap/partition_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap {
namespace {

using test::SeededTest;
using Partition = std::vector<std::int64_t>;

constexpr double kMib = 1 << 20;

class Search : public SeededTest {
 protected:
  BandwidthCurve random_curve(bool coarse) {
    std::vector<CurvePoint> points(static_cast<std::size_t>(pick(1, 8)));
    for (CurvePoint& point : points) {
      point.bytes = static_cast<double>(pick(1, 2000));
      // Coarse times make ties likely.
      point.time_us = coarse ? static_cast<double>(pick(1, 4)) : static_cast<double>(pick(1, 100000)) / 1000;
    }
    return {std::move(points), "random"};
  }

  OverlapCost random_cost(std::int64_t waves) {
    const bool coarse = pick(0, 1) == 0;
    const bool equal = pick(0, 1) == 0;
    OverlapCost cost{.finish_us = {}, .bytes = {}, .curve = random_curve(coarse)};
    double finish = 0;
    for (std::int64_t wave = 0; wave < waves; ++wave) {
      finish += coarse ? static_cast<double>(pick(0, 3)) : static_cast<double>(pick(0, 30000)) / 1000;
      cost.finish_us.push_back(finish);
      cost.bytes.push_back(equal && wave + 1 < waves ? 100 : pick(0, 300));
    }
    if (pick(0, 1) == 0) cost.signal_us = static_cast<double>(pick(0, 3));
    if (pick(0, 2) == 0) cost.restore_us = static_cast<double>(pick(0, 5));
    if (pick(0, 2) == 0) cost.slowdown = 1 + static_cast<double>(pick(0, 50)) / 100;
    if (pick(0, 2) == 0) cost.steal_us_per_mib = static_cast<double>(pick(0, 5000));
    return cost;
  }
};

/// An oracle of its own: recursion over the first group, no masks, no ticks.
double best_total(const OverlapCost& cost) {
  const std::int64_t waves = cost.num_waves();
  double best = std::numeric_limits<double>::infinity();
  Partition partition;
  const auto extend = [&](auto&& self, std::int64_t left) -> void {
    if (left == 0) {
      best = std::min(best, predict(cost, partition).total_us);
      return;
    }
    for (std::int64_t group = 1; group <= left; ++group) {
      partition.push_back(group);
      self(self, left - group);
      partition.pop_back();
    }
  };
  extend(extend, waves);
  return best;
}

TEST_F(Search, TheExhaustiveSearchFindsTheBest) {
  for (int round = 0; round < 60; ++round) {
    const OverlapCost cost = random_cost(pick(1, 9));
    EXPECT_NEAR(search_exhaustively(cost).prediction.total_us, best_total(cost), 1e-4) << round;
  }
}

TEST_F(Search, TheDynamicProgrammeEqualsTheExhaustiveSearchTiesIncluded) {
  for (int round = 0; round < 1500; ++round) {
    const OverlapCost cost = random_cost(pick(1, 14));
    const PartitionChoice exact = search_exhaustively(cost);
    const PartitionChoice fast = search_partition(cost);
    ASSERT_EQ(fast.partition, exact.partition) << "round " << round << ": " << fast.prediction.total_us
                                               << " and " << exact.prediction.total_us << " us";
  }
}

TEST_F(Search, NeverSlowerThanOneGroupAndNeverFasterThanTheBound) {
  for (int round = 0; round < 200; ++round) {
    OverlapCost cost = random_cost(pick(1, 200));
    const PartitionChoice choice = search_partition(cost);
    EXPECT_LE(choice.prediction.total_us, predict(cost, Partition{cost.num_waves()}).total_us + 1e-5);
    EXPECT_GE(choice.prediction.total_us, lower_bound_us(cost) * (1 - 1e-9) - 1e-5);
    EXPECT_EQ(std::accumulate(choice.partition.begin(), choice.partition.end(), std::int64_t{0}),
              cost.num_waves());
    EXPECT_TRUE(
        std::all_of(choice.partition.begin(), choice.partition.end(), [](auto group) { return group > 0; }));
  }
}

TEST(SearchTies, PreferLargerLastGroups) {
  // Instant transfers: every partition finishes with the last wave.
  const OverlapCost cost{
      .finish_us = {1, 2, 3}, .bytes = {0, 0, 0}, .curve = BandwidthCurve::from_link(1, 1, "unused")};
  EXPECT_EQ(search_partition(cost).partition, (Partition{3}));
  EXPECT_EQ(search_exhaustively(cost).partition, (Partition{3}));
}

TEST(SearchTies, HiddenGroupsAreJoined) {
  // Compute bound: the last wave alone is best, and before it everything may travel in few pieces.
  const OverlapCost cost{.finish_us = {10, 20, 30, 40, 50, 60},
                         .bytes = {10, 10, 10, 10, 10, 10},
                         .curve = BandwidthCurve::from_link(0, 0.0025, "4 us per wave")};
  EXPECT_EQ(search_partition(cost).partition, (Partition{3, 2, 1}));
  EXPECT_EQ(search_exhaustively(cost).partition, (Partition{3, 2, 1}));
}

TEST(Search21, PoorCurvesGiveSoundPartitions) {  // known fault B21
  using Rates = std::vector<BandwidthCurve::Rate>;
  for (const Rates& rates : {Rates{{kMib, 100}}, Rates{{kMib, 100}, {kMib, 50}},
                             Rates{{4 * kMib, 90}, {kMib, 100}, {2 * kMib, 95}},
                             Rates{{kMib, 100}, {2 * kMib, 50}, {4 * kMib, 120}}}) {
    for (const double wave_bytes : {kMib / 100, kMib, 400 * kMib}) {
      OverlapCost cost{.finish_us = {},
                       .bytes = std::vector<std::int64_t>(8, static_cast<std::int64_t>(wave_bytes)),
                       .curve = BandwidthCurve::from_rates(rates, "test")};
      for (int wave = 1; wave <= 8; ++wave) cost.finish_us.push_back(20 * wave);
      const PartitionChoice choice = search_partition(cost);
      EXPECT_TRUE(std::isfinite(choice.prediction.total_us) && choice.prediction.total_us > 0);
      EXPECT_EQ(std::accumulate(choice.partition.begin(), choice.partition.end(), std::int64_t{0}), 8);
      EXPECT_EQ(choice.partition, search_partition(cost).partition);
      EXPECT_EQ(choice.partition, search_exhaustively(cost).partition);
    }
  }
}

TEST_F(Search, ManyWavesAreJoinedToBlocks) {
  OverlapCost cost{.finish_us = {}, .bytes = {}, .curve = BandwidthCurve::from_link(5, 1, "test")};
  const std::int64_t waves = kMaxSearchWaves + 3;
  for (std::int64_t wave = 1; wave <= waves; ++wave) {
    cost.finish_us.push_back(static_cast<double>(wave));
    cost.bytes.push_back(500);
  }
  const PartitionChoice choice = search_partition(cost);
  EXPECT_EQ(std::accumulate(choice.partition.begin(), choice.partition.end(), std::int64_t{0}), waves);
  EXPECT_LT(choice.prediction.total_us, predict(cost, Partition{waves}).total_us);
}

TEST_F(Search, BestPartitionsAreDifferentAndInOrder) {
  for (const std::int64_t waves : {1, 5, 12, 30, 90}) {
    const OverlapCost cost = random_cost(waves);
    const std::vector<PartitionChoice> choices = best_partitions(cost, 5);
    ASSERT_FALSE(choices.empty());
    ASSERT_LE(choices.size(), 5U);
    EXPECT_NEAR(choices.front().prediction.total_us, search_partition(cost).prediction.total_us, 1e-4)
        << waves;
    for (std::size_t i = 1; i < choices.size(); ++i) {
      EXPECT_GE(choices[i].prediction.total_us, choices[i - 1].prediction.total_us);
      for (std::size_t j = 0; j < i; ++j) EXPECT_NE(choices[i].partition, choices[j].partition);
    }
  }
}

TEST(SearchLimits, AreNamed) {
  OverlapCost cost{.finish_us = std::vector<double>(21, 1),
                   .bytes = std::vector<std::int64_t>(21, 1),
                   .curve = BandwidthCurve::from_link(1, 1, "test")};
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "21 waves have 2^20 partitions",
                            static_cast<void>(search_exhaustively(cost)));
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "0 best partitions",
                            static_cast<void>(best_partitions(cost, 0)));
  cost.bytes.pop_back();
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "bytes of 20",
                            static_cast<void>(search_partition(cost)));
  cost = {.finish_us = {}, .bytes = {}, .curve = BandwidthCurve::from_link(1, 1, "test")};
  EXPECT_TRUE(search_partition(cost).partition.empty());
  EXPECT_TRUE(search_exhaustively(cost).partition.empty());
}

}  // namespace
}  // namespace flashoverlap

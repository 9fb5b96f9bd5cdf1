#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "flashoverlap/plan_builders.h"
#include "plan/random_plans.h"
#include "support/seed.h"

namespace flashoverlap::test {
namespace {

using testing::Test;

PlanOptions small() {
  PlanOptions o;
  o.world_size = 2;
  o.m = 8;
  o.n = 8;
  o.k = 4;
  o.tile_m = 4;
  o.tile_n = 4;
  return o;
}

template <typename Call>
std::string error_of(const Call& call) {
  try {
    (void)call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadArgument);
    return error.what();
  }
  return "no error";
}

TEST(TileGridTest, NumbersTilesProblemByProblemRowMajor) {
  const TileGrid grid({{.rows = 5, .cols = 3},
                       {.row_begin = 5, .rows = 0, .cols = 3},
                       {.row_begin = 5, .rows = 2, .cols = 3, .weight = 1}},
                      7, 4, 2);
  const std::vector<Tile> expected = {{0, 0, 4, 0, 2}, {0, 0, 4, 2, 1}, {0, 4, 1, 0, 2},
                                      {0, 4, 1, 2, 1}, {2, 5, 2, 0, 2}, {2, 5, 2, 2, 1}};
  EXPECT_EQ(grid.tiles(), expected);
  EXPECT_EQ(grid.rows(), 7);
  EXPECT_EQ(grid.cols(), 3);
}

TEST(TileGridTest, SizesBeyondTileSizesNearTheLimitDoNotOverflow) {
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  const TileGrid grid({{.row_begin = 3, .rows = 2, .cols = 1}}, 0, huge, huge);
  ASSERT_EQ(grid.num_tiles(), 1);
  EXPECT_EQ(grid.tile(0), (Tile{0, 3, 2, 0, 1}));
}

TEST(TileGridTest, RefusesWhatIsNoGrid) {
  EXPECT_EQ(error_of([] { return TileGrid({}, 1, 0, 4); }), "tile_m must be at least 1, got 0");
  EXPECT_EQ(error_of([] { return TileGrid({}, 1, 4, -2); }), "tile_n must be at least 1, got -2");
  EXPECT_EQ(error_of([] { return TileGrid({}, -1, 4, 4); }), "k must be at least 0, got -1");
  EXPECT_EQ(error_of([] { return TileGrid({{.rows = -1}}, 1, 4, 4); }),
            "problem 0: rows must be at least 0, got -1");
  EXPECT_EQ(error_of([] { return TileGrid({{.rows = 1 << 20, .cols = 1 << 20}}, 1, 4, 4); }),
            "tiles of 4 x 4 cut 1048576 x 1048576 into more than 268435456; use larger tiles");
}

TEST(SwizzleTest, WalksColumnByColumnInsideBands) {
  EXPECT_EQ(swizzled_order(3, 2, 1), (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(swizzled_order(3, 2, 2), (std::vector<std::int64_t>{0, 2, 1, 3, 4, 5}));
  EXPECT_EQ(swizzled_order(3, 2, 9), (std::vector<std::int64_t>{0, 2, 4, 1, 3, 5}));
  EXPECT_TRUE(swizzled_order(0, 5, 2).empty());
  EXPECT_EQ(error_of([] { return swizzled_order(1, 1, 0); }), "swizzle must be at least 1, got 0");
}

TEST(PartitionTest, DefaultHasAtMostEightNearlyEqualGroupsAndEndsWithOneWave) {
  EXPECT_TRUE(default_partition(0).empty());
  EXPECT_EQ(default_partition(1), (std::vector<std::int64_t>{1}));
  EXPECT_EQ(default_partition(2), (std::vector<std::int64_t>{1, 1}));
  for (std::int64_t waves = 1; waves < 200; ++waves) {
    const auto partition = default_partition(waves);
    ASSERT_LE(partition.size(), 8U);
    ASSERT_EQ(std::accumulate(partition.begin(), partition.end(), std::int64_t{0}), waves);
    ASSERT_EQ(partition.back(), 1);
    if (waves == 1) continue;
    const auto [low, high] = std::minmax_element(partition.begin(), partition.end() - 1);
    ASSERT_GE(*low, 1);
    ASSERT_LE(*high - *low, 1);
  }
}

TEST(PartitionTest, GroupsHaveAtLeastTheGivenBytes) {
  constexpr std::int64_t kMib = 1 << 20;
  // Eight equal waves of 4 MiB: two waves a group; the last group is as small as it may be.
  EXPECT_EQ(default_partition(8, 32 * kMib, 8 * kMib), (std::vector<std::int64_t>{2, 2, 2, 2}));
  EXPECT_EQ(default_partition(9, 36 * kMib, 8 * kMib), (std::vector<std::int64_t>{2, 2, 3, 2}));
  EXPECT_EQ(default_partition(5, 16 * kMib, 8 * kMib),
            (std::vector<std::int64_t>{5}));  // 3 and 2: too little
  EXPECT_EQ(default_partition(3, 1, 8 * kMib), (std::vector<std::int64_t>{3}));
  EXPECT_EQ(default_partition(3, 0, 1), (std::vector<std::int64_t>{3}));
  EXPECT_TRUE(default_partition(0, 0, 8 * kMib).empty());
  for (std::int64_t waves = 1; waves < 120; ++waves) {
    EXPECT_EQ(default_partition(waves, waves, 1), default_partition(waves));
    for (std::int64_t bytes = 1; bytes < 300; bytes += 7) {
      constexpr std::int64_t kLeast = 40;
      const auto partition = default_partition(waves, bytes, kLeast);
      ASSERT_LE(partition.size(), 8U);
      ASSERT_EQ(std::accumulate(partition.begin(), partition.end(), std::int64_t{0}), waves);
      for (const std::int64_t group : partition) {
        ASSERT_TRUE(partition.size() == 1 || group * bytes >= kLeast * waves) << waves << " waves, " << bytes;
      }
      // One wave less would be too little for the last group, and one group more for all of them.
      if (partition.size() > 1) {
        ASSERT_LT((partition.back() - 1) * bytes, kLeast * waves);
      }
      if (partition.size() < 8) {
        const auto groups = static_cast<std::int64_t>(partition.size()) + 1;
        const std::int64_t smallest = (kLeast * waves + bytes - 1) / bytes;
        ASSERT_GT(groups * smallest, waves) << waves << " waves, " << bytes;
      }
    }
  }
  EXPECT_EQ(error_of([] { return default_partition(-1, 1, 1); }), "waves must be at least 0, got -1");
  EXPECT_EQ(error_of([] { return default_partition(1, -1, 1); }), "bytes must be at least 0, got -1");
  EXPECT_EQ(error_of([] { return default_partition(1, 1, -1); }),
            "min_group_bytes must be at least 0, got -1");
}

TEST(BuildersTest, OptionsThatDoNotHoldAreNamed) {
  const auto with = [](const auto& change) {
    PlanOptions o = small();
    change(o);
    const std::string error = error_of([&] { return plan_all_reduce(o); });
    EXPECT_EQ(error, error_of([&] { return plan_reduce_scatter(o, RowOwnership::kBlockCyclic); }));
    return error;
  };
  EXPECT_EQ(with([](auto& o) { o.tile_m = 0; }), "tile_m must be at least 1, got 0");
  EXPECT_EQ(with([](auto& o) { o.tile_n = -1; }), "tile_n must be at least 1, got -1");
  EXPECT_EQ(with([](auto& o) { o.swizzle = 0; }), "swizzle must be at least 1, got 0");
  EXPECT_EQ(with([](auto& o) { o.m = -1; }), "m must be at least 0, got -1");
  EXPECT_EQ(with([](auto& o) { o.n = -3; }), "n must be at least 0, got -3");
  EXPECT_EQ(with([](auto& o) { o.k = -1; }), "k must be at least 0, got -1");
  EXPECT_EQ(with([](auto& o) { o.world_size = 0; }), "world_size must be at least 1, got 0");
  EXPECT_EQ(with([](auto& o) { o.rank = 3; }), "rank 3 is not in [0, 2)");
  EXPECT_EQ(with([](auto& o) { o.rank = -1; }), "rank -1 is not in [0, 2)");
  EXPECT_EQ(with([](auto& o) { o.resources.compute_units = 0; }), "compute_units must be at least 1, got 0");
  EXPECT_EQ(with([](auto& o) {
              o.partition = {1, 2, 2};
            }),
            "partition 1,2,2 sums to 5 waves, but the plan has 4");
  EXPECT_EQ(with([](auto& o) {
              o.partition = {1, 0, 3};
            }),
            "partition 1,0,3 gives group 1 0 waves; every group needs at least 1");
  EXPECT_EQ(with([](auto& o) {
              o.partition = {std::numeric_limits<std::int64_t>::max(), 5};
            }),
            "partition 9223372036854775807,5 sums to 9223372036854775807 waves, but the plan has 4");
  EXPECT_EQ(with([](auto& o) { o.m = 0, o.partition = {1}; }),
            "partition 1 sums to 1 waves, but the plan has 0");
  EXPECT_EQ(with([](auto& o) { o.m = o.n = std::int64_t{1} << 32; }),
            "m x n = 4294967296 x 4294967296 elements of f32 have 2^63 bytes or more");
  EXPECT_EQ(with([](auto& o) { o.k = std::int64_t{1} << 62; }),
            "m x k = 8 x 4611686018427387904 elements of f32 have 2^63 bytes or more");
}

TEST(BuildersTest, RoutingsThatDoNotHoldAreNamed) {
  PlanOptions o = small();
  o.world_size = 4;
  Routing routing{{{0, 1}, {0, 1, 2, 5}, {}, {}}};
  EXPECT_EQ(error_of([&] { return plan_all_to_all(o, routing); }),
            "destination 5 of row 3 of rank 1 is not a rank in [0, 4)");
  routing.destinations.pop_back();
  EXPECT_EQ(error_of([&] { return plan_all_to_all(o, routing); }),
            "routing has destinations for 3 ranks, but world_size is 4");
  o.rank = 4;
  EXPECT_EQ(error_of([&] { return plan_all_to_all(o, routing); }), "rank 4 is not in [0, 4)");
}

TEST(BuildersTest, NothingToComputeIsAPlanWithoutTilesOrTransfers) {
  for (const auto& [m, n] : {std::pair{0, 8}, {8, 0}, {0, 0}}) {
    PlanOptions o = small();
    o.m = m;
    o.n = n;
    const Routing routing{{std::vector<std::int32_t>(static_cast<std::size_t>(m), 1), {}}};
    for (const OverlapPlan& plan :
         {plan_all_reduce(o), plan_reduce_scatter(o, RowOwnership::kContiguous),
          plan_reduce_scatter(o, RowOwnership::kBlockCyclic), plan_all_to_all(o, routing)}) {
      SCOPED_TRACE(plan.operation);
      EXPECT_TRUE(plan.schedule.empty());
      EXPECT_EQ(plan.num_waves(), 0);
      EXPECT_TRUE(plan.groups.empty());
      EXPECT_TRUE(plan.transfers.empty());
      EXPECT_EQ(plan.output_rows * plan.output_cols, 0);
      EXPECT_EQ(verify(plan).reason, "");
    }
  }
}

TEST(BuildersTest, OneGroupReducesTheOutputInPlace) {
  PlanOptions o = small();
  o.partition = {4};
  const OverlapPlan plan = plan_all_reduce(o);
  ASSERT_EQ(plan.transfers.size(), 1U);
  EXPECT_EQ(plan.transfers[0].source, (Region{BufferKind::kOutput, 0, 64}));
  EXPECT_EQ(plan.transfers[0].destination, plan.transfers[0].source);
  EXPECT_EQ(plan.packed_size, 0);
  EXPECT_TRUE(plan.restore.bands.empty());
  EXPECT_EQ(verify(plan).reason, "");
}

TEST(BuildersTest, OneRankWritesInPlace) {
  PlanOptions o = small();
  o.world_size = 1;
  const Routing routing{{std::vector<std::int32_t>(8, 0)}};
  for (const OverlapPlan& plan :
       {plan_all_reduce(o), plan_reduce_scatter(o, RowOwnership::kContiguous),
        plan_reduce_scatter(o, RowOwnership::kBlockCyclic), plan_all_to_all(o, routing)}) {
    SCOPED_TRACE(plan.operation);
    EXPECT_TRUE(plan.transfers.empty());
    EXPECT_TRUE(plan.placement.segments.empty());
    EXPECT_TRUE(plan.restore.bands.empty());
    EXPECT_EQ(plan.output_rows, 8);
    EXPECT_EQ(verify(plan).reason, "");
  }
}

// B13 of the known faults: a row index times a row stride that wrapped in 32 bits.
TEST(BuildersTest, OffsetsBeyondThirtyTwoBits) {
  PlanOptions o = small();
  o.m = 524289;
  o.n = 4096;
  o.tile_m = 524288;
  o.tile_n = 4096;
  const OverlapPlan plan = plan_all_reduce(o);
  ASSERT_EQ(plan.grid.num_tiles(), 2);
  EXPECT_EQ(plan.grid.tile(1).row_begin, 524288);
  EXPECT_EQ(plan.placement.of_tile(1)[0].offset, 2147483648);
  EXPECT_EQ(plan.transfers.at(1).source.offset, 2147483648);
  EXPECT_EQ(plan.restore.pieces.at(1).offset, 2147483648);
  EXPECT_EQ(plan.restore.pieces.at(1).offset * size_of(DType::kFloat16), 4294967296);
  EXPECT_EQ(verify(plan).reason, "");
}

TEST(BuildersTest, ReduceScatterSharesEachGroupAboutEqually) {
  PlanOptions o = small();
  o.world_size = 4;
  o.m = 64;
  o.n = 64;
  o.resources.compute_units = 8;
  const OverlapPlan plan = plan_reduce_scatter(o, RowOwnership::kContiguous);
  ASSERT_EQ(plan.groups.size(), 8U);
  for (const Transfer& t : plan.transfers) EXPECT_TRUE(t.send_counts.empty()) << "shares are equal here";
  o.m = 62;
  std::size_t uneven = 0;
  for (const Transfer& t : plan_reduce_scatter(o, RowOwnership::kContiguous).transfers) {
    if (t.send_counts.empty()) continue;
    ++uneven;
    ASSERT_EQ(t.send_counts.size(), 4U);
    const auto [low, high] = std::ranges::minmax(t.send_counts);
    EXPECT_LE(high - low, high / 4 + 16) << "ragged tiles have 3 rows of 4; one tile more or less";
  }
  EXPECT_GT(uneven, 0U);
}

TEST(BuildersTest, RanksWithFewerWavesHaveAsManyGroups) {
  PlanOptions o = small();
  o.tile_n = 8;
  o.world_size = 3;
  o.partition = {2, 2, 4};
  const Routing routing{
      {std::vector<std::int32_t>(32, 1), std::vector<std::int32_t>(16, 0), std::vector<std::int32_t>(4, 0)}};
  const std::vector<std::vector<std::int64_t>> expected = {{2, 2, 4}, {1, 1, 2}, {0, 1, 0}};
  for (std::int32_t rank = 0; rank < 3; ++rank) {
    o.rank = rank;
    EXPECT_EQ(plan_all_to_all(o, routing).partition(), expected[static_cast<std::size_t>(rank)])
        << "rank " << rank;
  }
}

TEST(BuildersTest, AgreementTellsCallsApart) {
  std::set<std::uint64_t> seen;
  std::size_t calls = 0;
  const auto add = [&](const OverlapPlan& plan) {
    seen.insert(plan.agreement);
    ++calls;
  };
  const auto vary = [&](const auto& change) {
    PlanOptions o = small();
    change(o);
    add(plan_all_reduce(o));
    add(plan_reduce_scatter(o, RowOwnership::kContiguous));
    add(plan_reduce_scatter(o, RowOwnership::kBlockCyclic));
  };
  vary([](PlanOptions&) {});
  vary([](PlanOptions& o) { o.world_size = 3; });
  vary([](PlanOptions& o) { o.dtype = DType::kFloat16; });
  vary([](PlanOptions& o) { o.m = 7; });
  vary([](PlanOptions& o) { o.n = 7; });
  vary([](PlanOptions& o) { o.k = 5; });
  vary([](PlanOptions& o) { o.tile_m = 5; });
  vary([](PlanOptions& o) { o.tile_n = 5; });
  vary([](PlanOptions& o) { o.swizzle = 2; });
  vary([](PlanOptions& o) { o.resources.compute_units = 2; });
  vary([](PlanOptions& o) { o.partition = {1, 2, 1}; });
  const PlanOptions o = small();
  for (const Routing& r :
       {Routing{{{0, 1}, {1}}}, Routing{{{0}, {1, 1}}}, Routing{{{0, 1}, {0}}}, Routing{{{1, 0}, {1}}}}) {
    add(plan_all_to_all(o, r));
  }
  EXPECT_EQ(seen.size(), calls);

  PlanOptions other_rank = small();
  other_rank.rank = 1;
  other_rank.partition = default_partition(num_waves(other_rank));
  EXPECT_EQ(plan_all_reduce(other_rank).agreement, plan_all_reduce(small()).agreement) << "default spelt out";
}

class GroupTest : public SeededTest {};

TEST_F(GroupTest, GroupsWavesAndPartitionFitTogether) {
  RandomPlans random(rng_);
  for (int i = 0; i < 300; ++i) {
    const PlanCase c = random.next();
    SCOPED_TRACE(c.text());
    const OverlapPlan plan = c.plan(0);
    const auto partition = plan.partition();
    ASSERT_EQ(std::accumulate(partition.begin(), partition.end(), std::int64_t{0}), plan.num_waves());
    if (c.operation != PlanCase::Operation::kAllToAll && !c.options.partition.empty()) {
      ASSERT_EQ(partition, c.options.partition);
    }
    for (std::int64_t p = 0; p < std::ssize(plan.schedule); ++p) {
      const WaveGroup& group = plan.groups[static_cast<std::size_t>(plan.group_of(p))];
      ASSERT_GE(p, group.first_position);
      ASSERT_LT(p, group.first_position + group.num_tiles);
      ASSERT_EQ(plan.wave_of(p), p / c.options.resources.compute_units);
    }
  }
}

}  // namespace
}  // namespace flashoverlap::test

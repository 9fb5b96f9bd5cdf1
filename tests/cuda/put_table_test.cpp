/// What ranks put into each other's memory, carried out here byte by byte: everything arrives once, and each
/// rank waits for as many puts as are made.
#include "cuda/put_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "flashoverlap/moe_plan.h"
#include "flashoverlap/plan_builders.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap::cuda {
namespace {

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

class PutTables : public test::SeededTest {
 protected:
  std::vector<OverlapPlan> random_plans() {
    MoePlanOptions options;
    options.world_size = static_cast<std::int32_t>(pick(2, 6));
    options.dtype = DType::kBFloat16;
    options.num_experts = pick(1, 9);
    options.tile_m = pick(1, 6);
    options.tile_n = pick(1, 6);
    options.segment_bands = pick(1, 3);
    options.resources.communication_units = pick(1, 8);
    MoeCounts counts{options.world_size, options.num_experts, {}};
    for (std::int64_t i = 0; i < options.world_size * options.num_experts; ++i)
      counts.rows.push_back(pick(0, 2) == 0 ? 0 : pick(0, 9));
    return plan_moe_combine_all(options, counts, pick(1, 12), pick(1, 4));
  }
};

TEST_F(PutTables, EverythingArrivesOnceAndIsCounted) {
  for (int round = 0; round < 200; ++round) {
    const std::vector<OverlapPlan> plans = random_plans();
    const bool last_ends_gemm = pick(0, 1) == 0;
    std::vector<PutTable> tables;
    std::vector<std::vector<int>> written;
    for (const OverlapPlan& plan : plans) {
      tables.push_back(make_put_table(plan, last_ends_gemm, {}));
      written.emplace_back(index(plan.received_size * size_of(plan.dtype)), 0);
    }
    for (std::size_t rank = 0; rank < plans.size(); ++rank) {
      std::vector<std::uint32_t> puts(plans.size(), 0);
      for (const PutWork& put : tables[rank].puts) {
        EXPECT_EQ(put.ordinal, ++puts[index(put.peer)]);
        std::vector<int>& to = written[index(put.peer)];
        ASSERT_LE(index(put.to + put.bytes), to.size());
        ASSERT_LE(put.from + put.bytes, plans[rank].packed_size * size_of(plans[rank].dtype));
        for (std::int64_t i = put.to; i < put.to + put.bytes; ++i) ++to[index(i)];
      }
      EXPECT_EQ(puts, tables[rank].sent);
      for (std::size_t peer = 0; peer < plans.size(); ++peer) {
        EXPECT_EQ(tables[rank].sent[peer], tables[peer].received[rank]) << rank << " to " << peer;
        EXPECT_TRUE(peer == rank || tables[rank].sent[peer] > 0) << rank << " is not heard of by " << peer;
      }
    }
    for (const std::vector<int>& bytes : written)
      EXPECT_TRUE(std::ranges::all_of(bytes, [](int times) { return times == 1; }));
    if (HasFailure()) return;
  }
}

// A block waits for groups in the order of the table, so each must be there before the next.
TEST_F(PutTables, SegmentsAreInTheOrderInWhichTheyAreComplete) {
  for (int round = 0; round < 100; ++round) {
    for (const OverlapPlan& plan : random_plans()) {
      const PutTable table = make_put_table(plan, true, {});
      std::int32_t group = 0;
      std::size_t i = 0;
      for (; i < table.puts.size() && table.puts[i].bytes > 0; ++i) {
        EXPECT_GE(table.puts[i].group, group);
        group = table.puts[i].group;
        EXPECT_EQ(table.puts[i].tiles, plan.groups[index(group)].num_tiles);
      }
      EXPECT_EQ(table.puts.size() - i, index(plan.world_size - 1)) << "to each other rank, behind all tiles";
      const std::int64_t last = std::ssize(plan.groups) - 1;
      EXPECT_GE(group, last - 1) << "only own tiles, the last group, may have nothing to put";
      for (; i < table.puts.size(); ++i) {
        EXPECT_EQ(table.puts[i].group, last);
        EXPECT_EQ(table.puts[i].tiles, last < 0 ? 0 : plan.groups.back().num_tiles);
      }
    }
  }
}

TEST_F(PutTables, PutsToOtherRanksArePaced) {
  for (const OverlapPlan& plan : random_plans()) {
    for (const PutWork& put : make_put_table(plan, true, {.bandwidth_gbps = 0.5, .latency_us = 3}).puts) {
      const bool travels = put.bytes > 0 && put.peer != plan.rank;
      EXPECT_EQ(put.paced_ns, travels ? 3000 + 2 * static_cast<std::uint32_t>(put.bytes) : 0);
    }
  }
}

TEST(PutTable, RefusesOtherPuts) {
  MoePlanOptions options;
  options.world_size = 2;
  options.num_experts = 2;
  const MoeCounts counts{2, 2, {1, 1, 1, 1}};
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "is a put from the input to the input buffer",
                            (void)make_put_table(plan_moe_dispatch(options, counts, 4, 4), false, {}));
  PlanOptions gather;
  gather.world_size = 2;
  EXPECT_FALSE(has_puts(plan_all_gather_gemm(gather, {})));
  EXPECT_TRUE(has_puts(plan_moe_combine(options, counts, 4, 4)));
}

}  // namespace
}  // namespace flashoverlap::cuda

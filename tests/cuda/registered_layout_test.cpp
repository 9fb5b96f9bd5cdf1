/// Which plans may have their workspace registered with NCCL: those of one call on all ranks, or on none.
#include "cuda/registered_layout.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "flashoverlap/plan_builders.h"

namespace flashoverlap::cuda {
namespace {

constexpr std::int32_t kWorld = 3;

PlanOptions shape(std::int32_t rank) {
  PlanOptions options;
  options.rank = rank;
  options.world_size = kWorld;
  options.dtype = DType::kBFloat16;
  options.m = 96;
  options.n = 72;
  options.k = 8;
  options.tile_m = 16;
  options.tile_n = 24;
  options.resources.compute_units = 3;
  return options;
}

/// Of the plans of all ranks.
std::set<std::uint64_t> layouts(const std::function<OverlapPlan(const PlanOptions&)>& build) {
  std::set<std::uint64_t> found;
  for (std::int32_t rank = 0; rank < kWorld; ++rank) found.insert(registered_layout(build(shape(rank))));
  return found;
}

TEST(RegisteredLayout, SumsInThePackedBufferAreAtTheSameOffsetOnAllRanks) {
  for (const RowOwnership rows : {RowOwnership::kContiguous, RowOwnership::kBlockCyclic}) {
    const auto found =
        layouts([&](const PlanOptions& options) { return plan_reduce_scatter(options, rows); });
    EXPECT_EQ(found.size(), 1U);
    EXPECT_FALSE(found.contains(0));
  }
  const auto found = layouts(plan_all_reduce);
  EXPECT_EQ(found.size(), 1U);
  EXPECT_FALSE(found.contains(0));
}

TEST(RegisteredLayout, AnotherOffsetIsAnotherLayout) {
  OverlapPlan plan = plan_all_reduce(shape(0));
  ASSERT_GT(plan.transfers.size(), 1U);
  const std::uint64_t before = registered_layout(plan);
  plan.transfers.back().source.offset += 8;
  EXPECT_NE(registered_layout(plan), before);
}

TEST(RegisteredLayout, MessagesMayBeAnywhereInTheWorkspace) {
  const Routing routing{{{0, 1, 2, 2, 1}, {}, {1, 1}}};
  const auto found = layouts([&](const PlanOptions& options) { return plan_all_to_all(options, routing); });
  EXPECT_EQ(found.size(), 1U);
  EXPECT_FALSE(found.contains(0));
  EXPECT_EQ(layouts([](const PlanOptions& options) { return plan_tail_free_reduce_scatter(options, {}); }),
            found);
}

TEST(RegisteredLayout, WhatTravelsInTheCallersMatricesHasNone) {
  const std::set<std::uint64_t> none{0};
  const HeadSlices heads;
  EXPECT_EQ(layouts([](const PlanOptions& options) { return plan_all_gather_gemm(options, {}); }), none);
  EXPECT_EQ(layouts([&](const PlanOptions& options) { return plan_gemm_all_to_all(options, heads); }), none);
  EXPECT_EQ(layouts([](PlanOptions options) {
              options.partition = {num_waves(options)};
              return plan_all_reduce(options);
            }),
            none);
}

}  // namespace
}  // namespace flashoverlap::cuda

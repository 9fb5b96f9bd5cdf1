#include "plan/sliced_call.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap::test {
namespace {

using plan::SlicedCall;
using plan::SlicedOp;
using plan::SlicedPlan;

constexpr SlicedOp kOps[] = {SlicedOp::kAllGatherGemm, SlicedOp::kReduceScatter, SlicedOp::kShardedWeight,
                             SlicedOp::kGradient,      SlicedOp::kHeads,         SlicedOp::kFromHeads};

class SlicedCalls : public SeededTest {
 protected:
  PlanOptions options() {
    return {.world_size = static_cast<std::int32_t>(pick(2, 6)),
            .m = pick(1, 60),
            .n = pick(1, 60),
            .k = pick(1, 40),
            .tile_m = pick(1, 16),
            .tile_n = pick(1, 16),
            .swizzle = pick(1, 3),
            .resources = {pick(1, 4), 0},
            .partition = {}};
  }

  SliceOptions slices(std::int64_t size, std::int32_t world_size) {
    std::vector<std::int64_t> cuts{0, size};
    for (std::int32_t i = 1; i < world_size; ++i) cuts.push_back(pick(0, size));
    std::ranges::sort(cuts);
    SliceOptions made{.sizes = {}, .parts = pick(0, 3), .send_channels = pick(0, 3)};
    for (std::size_t i = 1; i < cuts.size(); ++i) made.sizes.push_back(cuts[i] - cuts[i - 1]);
    return made;
  }

  SlicedCall call(SlicedOp op, const PlanOptions& options) {
    SlicedCall made{.op = op, .slices = {}, .num_slices = pick(1, 5)};
    made.slices.rows = slices(op == SlicedOp::kShardedWeight ? options.n : options.m, options.world_size);
    made.slices.columns = slices(op == SlicedOp::kFromHeads ? options.k : options.n, options.world_size);
    return made;
  }
};

std::vector<OverlapPlan> plans_of(const SlicedCall& call, PlanOptions options, SlicedPlan which) {
  std::vector<OverlapPlan> plans;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
    plans.push_back(plan_sliced_call(call, options, which));
  }
  return plans;
}

/// Collectives that move bytes.
std::int64_t collectives(const OverlapPlan& plan) {
  return std::ranges::count_if(plan.transfers, [](const Transfer& transfer) {
    return transfer.kind != TransferKind::kSend && transfer.kind != TransferKind::kReceive;
  });
}

TEST_F(SlicedCalls, PlansOfAllRanksHoldTogether) {
  for (int i = 0; i < 60; ++i) {
    for (const SlicedOp op : kOps) {
      const PlanOptions chosen = options();
      const SlicedCall made = call(op, chosen);
      const auto tail_free = plans_of(made, chosen, SlicedPlan::kTailFree);
      EXPECT_TRUE(verify(tail_free)) << verify(tail_free).reason;
      const auto serial = plans_of(made, chosen, SlicedPlan::kSerial);
      EXPECT_TRUE(verify(serial)) << verify(serial).reason;
      for (const OverlapPlan& plan : tail_free) EXPECT_EQ(collectives(plan), 0) << plan.operation;
      for (const OverlapPlan& plan : serial) EXPECT_LE(collectives(plan), 1) << plan.operation;
      EXPECT_EQ(serial[0].output_cols, tail_free[0].output_cols);
      const auto sliced = plans_of(made, chosen, SlicedPlan::kSliced);
      EXPECT_TRUE(verify(sliced)) << verify(sliced).reason;
      for (const OverlapPlan& plan : sliced) EXPECT_LE(collectives(plan), made.num_slices) << plan.operation;
    }
  }
}

TEST_F(SlicedCalls, OneSliceIsSerial) {
  for (const SlicedOp op : kOps) {
    const PlanOptions chosen = options();
    SlicedCall made = call(op, chosen);
    made.num_slices = 1;
    EXPECT_EQ(plan_sliced_call(made, chosen, SlicedPlan::kSliced),
              plan_sliced_call(made, chosen, SlicedPlan::kSerial));
  }
}

TEST_F(SlicedCalls, BadCallsSayWhatIsExpected) {
  const PlanOptions chosen = options();
  SlicedCall made;
  const auto refuse = [&](const char* message) {
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, message,
                              static_cast<void>(plan_sliced_call(made, chosen, SlicedPlan::kSliced)));
  };
  for (const SlicedOp op : kOps) {
    made = call(op, chosen);
    made.num_slices = 0;
    refuse("num_slices is 0; it must be at least 1");
    made.num_slices = 65537;
    refuse("num_slices is 65537; it must be at most 65536");
  }
}

}  // namespace
}  // namespace flashoverlap::test

#include "flashoverlap/moe_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap {
namespace {

using MoePlanTest = test::SeededTest;

struct Case {
  MoePadding padding;
  MoeOrder order;
  MoeTransport transport;
};

constexpr Case kCases[] = {
    {MoePadding::kPaper, MoeOrder::kExpertMajor, MoeTransport::kPut},
    {MoePadding::kPaper, MoeOrder::kOwnerMajor, MoeTransport::kPut},
    {MoePadding::kRagged, MoeOrder::kExpertMajor, MoeTransport::kPut},
    {MoePadding::kRagged, MoeOrder::kOwnerMajor, MoeTransport::kPut},
    {MoePadding::kShared, MoeOrder::kExpertMajor, MoeTransport::kPut},
    {MoePadding::kRagged, MoeOrder::kOwnerMajor, MoeTransport::kCollective},
};

std::string text_of(const MoePlanOptions& o, const MoeCounts& c, std::int64_t n, std::int64_t k) {
  std::string text = "W=" + std::to_string(o.world_size) + " E=" + std::to_string(o.num_experts) +
                     " tile=" + std::to_string(o.tile_m) + "x" + std::to_string(o.tile_n) +
                     " n=" + std::to_string(n) + " k=" + std::to_string(k) +
                     " x=" + std::to_string(o.segment_bands) + " " + std::string(name_of(o.padding)) + " " +
                     std::string(name_of(o.order)) + " " + std::string(name_of(o.transport)) + " counts";
  for (const std::int64_t rows : c.rows) text += " " + std::to_string(rows);
  return text;
}

/// A world of two ranks with two experts each, and rows that differ everywhere.
MoeCounts small_counts() {
  return {2, 4, {3, 0, 5, 1, 2, 4, 0, 6}};
}

MoePlanOptions small_options(std::int32_t rank = 0) {
  MoePlanOptions options;
  options.rank = rank;
  options.world_size = 2;
  options.num_experts = 4;
  options.tile_m = 4;
  options.tile_n = 8;
  return options;
}

class MoeCounts_ {};

TEST_F(MoePlanTest, PlansOfAllRanksHold) {
  for (int round = 0; round < 150; ++round) {
    MoePlanOptions options;
    options.world_size = static_cast<std::int32_t>(pick(1, 6));
    options.num_experts = pick(1, 9);
    options.tile_m = pick(1, 6);
    options.tile_n = pick(1, 9);
    options.segment_bands = pick(1, 4);
    options.collective_groups = pick(1, 5);
    options.resources = {pick(1, 4), pick(0, 3)};
    MoeCounts counts{options.world_size, options.num_experts, {}};
    const std::int64_t most = pick(0, 1) == 0 ? 3 : 14;
    for (std::int64_t i = 0; i < counts.world_size * counts.num_experts; ++i) {
      counts.rows.push_back(pick(0, 3) == 0 ? 0 : pick(0, most));
    }
    const std::int64_t n = pick(0, 20);
    const std::int64_t k = pick(0, 5);
    for (const Case& c : kCases) {
      options.padding = c.padding;
      options.order = c.order;
      options.transport = c.transport;
      SCOPED_TRACE(text_of(options, counts, n, k));
      const auto dispatch = plan_moe_dispatch_all(options, counts, n, k);
      const auto combine = plan_moe_combine_all(options, counts, n, k);
      EXPECT_EQ(verify(std::span<const OverlapPlan>(dispatch)).reason, "");
      EXPECT_EQ(verify(std::span<const OverlapPlan>(combine)).reason, "");
      const auto rank = static_cast<std::int32_t>(pick(0, options.world_size - 1));
      options.rank = rank;
      EXPECT_EQ(plan_moe_dispatch(options, counts, n, k), dispatch[static_cast<std::size_t>(rank)]);
      EXPECT_EQ(plan_moe_combine(options, counts, n, k), combine[static_cast<std::size_t>(rank)]);
      EXPECT_EQ(plan_from_json(to_json(dispatch[static_cast<std::size_t>(rank)])),
                dispatch[static_cast<std::size_t>(rank)]);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace flashoverlap

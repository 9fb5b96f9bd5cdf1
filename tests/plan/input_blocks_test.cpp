/// Plans whose A lies in blocks that arrive from other ranks: what verify refuses.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "flashoverlap/plan_builders.h"
#include "support/seed.h"

namespace flashoverlap::test {
namespace {

using Plans = std::vector<OverlapPlan>;

std::string reason_of(const Plans& plans) {
  return verify(std::span<const OverlapPlan>(plans)).reason;
}

/// `num_slices`: of the baseline; 0: tail-free.
Plans plans_of(PlanOptions options, const HeadSlices& heads, std::int64_t num_slices = 0) {
  Plans plans;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
    plans.push_back(num_slices > 0 ? plan_sliced_all_to_all_gemm(options, heads, num_slices)
                                   : plan_all_to_all_gemm(options, heads));
  }
  return plans;
}

PlanOptions small() {
  PlanOptions options;
  options.world_size = 2;
  options.m = 8;
  options.n = 4;
  options.k = 6;
  options.tile_m = 2;
  options.tile_n = 4;
  return options;
}

TEST(InputBlocks, HoldWhatOtherRanksHaveThere) {
  const std::pair<std::function<void(Plans&)>, const char*> cases[] = {
      // Both ranks' blocks say columns that the other does not have.
      {[](Plans& p) {
         for (OverlapPlan& plan : p) std::swap(plan.input_blocks[0].k_begin, plan.input_blocks[1].k_begin);
       },
       "rank 0: input block 0 has columns [3, 6), from element 0 of the input buffer on"},
      // Rank 1 sends rows [1, 5), not those of rank 0's tokens, [0, 4).
      {[](Plans& p) { p[1].transfers[0].source.offset = 3; },
       "rank 0: input block 1 takes element 3 of rank 1's input at element 0; expected element 0"},
      {[](Plans& p) { p[0].input_blocks[0].offset = 3; },
       "from element 3 of the input buffer on; expected inside [0, 3), from element 0 on"}};
  ASSERT_EQ(reason_of(plans_of(small(), {})), "");
  for (const auto& [change, expected] : cases) {
    Plans plans = plans_of(small(), {});
    change(plans);
    EXPECT_NE(reason_of(plans).find(expected), std::string::npos)
        << reason_of(plans) << "\nnot: " << expected;
  }
}

TEST(InputBlocks, PassesThatWaitForEachOtherAreADeadlock) {
  Plans plans = plans_of(small(), {});
  for (OverlapPlan& plan : plans) plan.transfers[0].trigger = {TriggerKind::kGroup, 0};
  const std::string reason = reason_of(plans);
  EXPECT_EQ(reason.substr(0, 9), "deadlock:") << reason;
  EXPECT_NE(reason.find("waits for group 0 (0 of 2 tiles done)"), std::string::npos) << reason;
}

class InputBlockMutations : public SeededTest {
 protected:
  SliceOptions slices(std::int64_t size, std::int32_t world) {
    SliceOptions result{.sizes = {}, .parts = pick(0, 3)};
    std::vector<std::int64_t> cuts{0, size};
    for (std::int32_t i = 1; i < world; ++i) cuts.push_back(pick(0, size));
    std::ranges::sort(cuts);
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) result.sizes.push_back(cuts[i + 1] - cuts[i]);
    return result;
  }

  std::string mutate(OverlapPlan& plan) {
    std::vector<std::pair<const char*, std::int64_t*>> numbers;
    for (InputBlock& b : plan.input_blocks) {
      numbers.emplace_back("block column", &b.k_begin);
      numbers.emplace_back("block depth", &b.depth);
      numbers.emplace_back("block offset", &b.offset);
    }
    for (Gate& g : plan.gates) {
      numbers.emplace_back("gate slice", &g.slice);
      numbers.emplace_back("gate k_begin", &g.k_begin);
    }
    for (Slice& s : plan.slices) {
      numbers.emplace_back("slice offset", &s.region.offset);
      numbers.emplace_back("slice count", &s.region.count);
    }
    for (Transfer& t : plan.transfers) {
      Region& region = t.kind == TransferKind::kSend ? t.source : t.destination;
      numbers.emplace_back("transfer offset", &region.offset);
      numbers.emplace_back("transfer count", &region.count);
      for (std::int64_t& c : t.send_counts) numbers.emplace_back("send count", &c);
      for (std::int64_t& c : t.receive_counts) numbers.emplace_back("receive count", &c);
    }
    numbers.emplace_back("input columns", &plan.input_cols);
    const auto& [name, number] = numbers[static_cast<std::size_t>(pick(0, std::ssize(numbers) - 1))];
    const std::int64_t before = *number;
    *number += pick(1, 3) * (pick(0, 1) == 0 ? 1 : -1);
    return fmt::format("{} from {} to {}", name, before, *number);
  }
};

// A gate may wait earlier than it must, and what is empty may be anywhere.
TEST_F(InputBlockMutations, AnyChangedNumberIsNoticed) {
  for (int mutations = 0; mutations < 2000;) {
    PlanOptions options;
    options.world_size = static_cast<std::int32_t>(pick(2, 6));
    options.m = pick(1, 40);
    options.n = pick(1, 20);
    options.k = pick(2, 20);
    options.tile_m = pick(1, 12);
    options.tile_n = pick(1, 12);
    const HeadSlices heads{slices(options.m, options.world_size), slices(options.k, options.world_size)};
    Plans plans = plans_of(options, heads, std::max<std::int64_t>(0, pick(-3, 3)));
    OverlapPlan& plan = plans[static_cast<std::size_t>(pick(0, options.world_size - 1))];
    const bool has_empty =
        plan.schedule.empty() ||
        std::ranges::any_of(plan.slices, [](const Slice& s) { return s.region.count == 0; }) ||
        plan.input_cols == 0;
    if (has_empty || plan.input_blocks.empty()) continue;
    ASSERT_EQ(reason_of(plans), "");
    const OverlapPlan before = plan;
    const std::string what = mutate(plan);
    ++mutations;
    bool earlier = plan.gates.size() == before.gates.size();
    for (std::size_t g = 0; g < plan.gates.size(); ++g) {
      earlier &= plan.gates[g].k_begin >= 0 && plan.gates[g].k_begin <= before.gates[g].k_begin;
    }
    if (what.starts_with("gate k_begin") && earlier) continue;
    ASSERT_NE(reason_of(plans), "") << "rank " << plan.rank << " of " << options.world_size << ": " << what
                                    << "\n"
                                    << to_text(before);
  }
}

}  // namespace
}  // namespace flashoverlap::test

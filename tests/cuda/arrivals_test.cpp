/// The order in which a GPU's communication stream makes a plan's calls, run through here on all ranks at
/// once as NCCL would: a call is over when each of its messages is being sent and received at the same time.
#include "cuda/arrivals.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>

#include "flashoverlap/plan_builders.h"
#include "small_product.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap::cuda {
namespace {

using test::message_of;

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// By position: arrivals before the tile has read all that it reads.
std::vector<std::uint32_t> start_of_tiles(const GateTables& tables) {
  std::vector<std::uint32_t> needed;
  for (auto first = tables.start.begin(); first != tables.start.end(); first += tables.blocks)
    needed.push_back(*std::max_element(first, first + tables.blocks));
  return needed;
}

/// One rank on its way through its steps, with a GEMM of one unit, which stands still where a tile waits.
class Walker {
 public:
  Walker(const OverlapPlan& plan, std::vector<TransferStep> steps) : plan_(plan), steps_(std::move(steps)) {
    const GateTables tables = gate_tables(plan, steps_);
    needed_ = tables.start.empty() ? tables.finish : start_of_tiles(tables);
    needed_.resize(plan.schedule.size(), 0);
    enter();
  }

  [[nodiscard]] bool is_done() const { return at_ == steps_.size() && computed_ == needed_.size(); }
  [[nodiscard]] const Transfer* sending() const { return open(sending_, &TransferStep::send); }
  [[nodiscard]] const Transfer* receiving() const { return open(receiving_, &TransferStep::receive); }
  void sent() { sending_ = false; }
  void received() { receiving_ = false; }
  /// Whether a tile was computed, or the call was over and the next one has begun.
  bool advance() {
    if (computed_ < needed_.size() && needed_[computed_] <= arrivals_) {
      ++computed_;
      return true;
    }
    if (at_ == steps_.size() || sending_ || receiving_) return false;
    arrivals_ = steps_[at_].arrivals;
    ++at_;
    enter();
    return true;
  }

 private:
  void enter() {
    sending_ = at_ < steps_.size() && steps_[at_].send >= 0;
    receiving_ = at_ < steps_.size() && steps_[at_].receive >= 0;
  }
  /// What the step's send waits for is computed; the whole call begins only then.
  [[nodiscard]] bool may_begin() const {
    if (at_ == steps_.size() || steps_[at_].send < 0) return true;
    const Trigger& trigger = plan_.transfers[index(steps_[at_].send)].trigger;
    if (trigger.kind != TriggerKind::kGroup) return true;
    const WaveGroup& group = plan_.groups[index(trigger.index)];
    return computed_ >= index(group.first_position + group.num_tiles);
  }
  [[nodiscard]] const Transfer* open(bool is_open, std::int64_t TransferStep::*which) const {
    return is_open && may_begin() ? &plan_.transfers[index(steps_[at_].*which)] : nullptr;
  }

  const OverlapPlan& plan_;
  std::vector<TransferStep> steps_;
  std::vector<std::uint32_t> needed_;  // by position
  std::size_t computed_ = 0;
  std::uint32_t arrivals_ = 0;
  std::size_t at_ = 0;
  bool sending_ = false;
  bool receiving_ = false;
};

/// Ranks that never come to the end of their steps; none: all messages went through, and fitted.
std::vector<std::size_t> stuck_ranks(const std::vector<OverlapPlan>& plans,
                                     const std::vector<std::vector<TransferStep>>& steps) {
  std::vector<Walker> walkers;
  for (std::size_t r = 0; r < plans.size(); ++r) walkers.emplace_back(plans[r], steps[r]);
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (std::size_t r = 0; r < walkers.size(); ++r) {
      if (const Transfer* const sending = walkers[r].sending()) {
        Walker& peer = walkers[index(sending->peer)];
        const Transfer* const receiving = peer.receiving();
        if (receiving != nullptr && std::cmp_equal(receiving->peer, r)) {
          EXPECT_EQ(sending->source.count, receiving->destination.count);
          walkers[r].sent();
          peer.received();
          goes_on = true;
        }
      }
    }
    for (Walker& walker : walkers) goes_on = walker.advance() || goes_on;
  }
  std::vector<std::size_t> stuck;
  for (std::size_t r = 0; r < walkers.size(); ++r) {
    if (!walkers[r].is_done()) stuck.push_back(r);
  }
  return stuck;
}

std::vector<std::vector<TransferStep>> steps_of(const std::vector<OverlapPlan>& plans) {
  std::vector<std::vector<TransferStep>> steps;
  for (const OverlapPlan& plan : plans) steps.push_back(transfer_steps(plan));
  return steps;
}

std::vector<OverlapPlan> plans_of(PlanOptions options,
                                  const std::function<OverlapPlan(const PlanOptions&)>& build) {
  std::vector<OverlapPlan> plans;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) plans.push_back(build(options));
  return plans;
}

/// Every message in one step, steps alike on all ranks, arrivals counted in the order of the steps.
void expect_complete(const OverlapPlan& plan, const std::vector<TransferStep>& steps) {
  std::vector<int> uses(plan.transfers.size(), 0);
  std::uint32_t arrivals = 0;
  for (const TransferStep& step : steps) {
    for (const std::int64_t transfer : {step.send, step.receive, step.collective}) {
      if (transfer >= 0) ++uses[index(transfer)];
    }
    const std::int64_t brings = step.collective >= 0 ? step.collective : step.receive;
    const bool brings_slice = brings >= 0 && plan.transfers[index(brings)].slice >= 0;
    EXPECT_EQ(step.brings_slice, brings_slice);
    arrivals += brings_slice ? 1 : 0;
    EXPECT_EQ(step.arrivals, arrivals);
  }
  EXPECT_TRUE(std::all_of(uses.begin(), uses.end(), [](int count) { return count == 1; }));
  EXPECT_EQ(arrivals, plan.slices.size());
}

/// When each tile may start or be stored, straight from the plan's gates.
void expect_needed(const OverlapPlan& plan, const std::vector<TransferStep>& steps) {
  std::map<std::int64_t, std::uint32_t> arrival_of;
  for (const TransferStep& step : steps) {
    const std::int64_t brings = step.collective >= 0 ? step.collective : step.receive;
    if (step.brings_slice) arrival_of[plan.transfers[index(brings)].slice] = step.arrivals;
  }
  const GateTables tables = gate_tables(plan, steps);
  if (plan.gates.empty()) {
    EXPECT_TRUE(tables.start.empty() && tables.finish.empty() && tables.added.empty());
    return;
  }
  const bool at_start = plan.gates.front().point == GatePoint::kStart;
  EXPECT_TRUE((at_start ? tables.finish : tables.start).empty());
  const std::vector<std::uint32_t> needed = at_start ? start_of_tiles(tables) : tables.finish;
  ASSERT_EQ(needed.size(), plan.schedule.size());
  for (std::size_t position = 0; position < needed.size(); ++position) {
    std::uint32_t expected = 0;
    for (const Gate& gate : plan.gates) {
      if (gate.tile == plan.schedule[position]) expected = std::max(expected, arrival_of.at(gate.slice));
    }
    EXPECT_EQ(needed[position], expected) << "position " << position;
  }
  // Tiles come in the order in which their slices do: no tile waits behind one that waits for longer. At
  // their end all wait for the last rank's.
  EXPECT_TRUE(std::is_sorted(needed.begin(), needed.end()));
}

/// The plans hold together, and all messages go through, by as many calls on every rank.
void expect_run_through(const std::vector<OverlapPlan>& plans) {
  ASSERT_TRUE(verify(plans)) << verify(plans).reason;
  const auto steps = steps_of(plans);
  for (std::size_t r = 0; r < plans.size(); ++r) {
    SCOPED_TRACE(fmt::format("rank {}", r));
    expect_complete(plans[r], steps[r]);
    expect_needed(plans[r], steps[r]);
    EXPECT_EQ(steps[r].size(), steps[0].size()) << "every rank makes as many calls";
  }
  EXPECT_EQ(stuck_ranks(plans, steps), std::vector<std::size_t>{});
}

class ArrivalsTest : public test::SeededTest {
 protected:
  SliceOptions random_slices(std::int64_t size, std::int32_t world_size) {
    SliceOptions slices;
    slices.parts = pick(0, 4);
    if (pick(0, 1) == 0) return slices;
    std::vector<std::int64_t> ends{0, size};
    for (std::int32_t r = 1; r < world_size; ++r) ends.push_back(pick(0, 2) == 0 ? 0 : pick(0, size));
    std::sort(ends.begin(), ends.end());
    for (std::size_t r = 0; r < index(world_size); ++r) slices.sizes.push_back(ends[r + 1] - ends[r]);
    return slices;
  }
};

TEST_F(ArrivalsTest, AllGatherRunsThroughOnAllRanks) {
  for (int i = 0; i < 150; ++i) {
    const auto world_size = static_cast<std::int32_t>(pick(1, 9));
    const PlanOptions options = test::small_product(world_size, pick(0, 400), pick(0, 300), pick(0, 40));
    const SliceAxis axis = pick(0, 1) == 0 ? SliceAxis::kRows : SliceAxis::kColumns;
    const SliceOptions slices = random_slices(axis == SliceAxis::kRows ? options.m : options.n, world_size);
    const std::int64_t num_slices = pick(0, 3);  // 0: by messages, else by so many collectives
    SCOPED_TRACE(fmt::format("{} ranks, m={} n={} k={}, {} parts, {} slices", world_size, options.m,
                             options.n, options.k, slices.parts, num_slices));
    const auto plans = plans_of(options, [&](const PlanOptions& own) {
      return num_slices == 0 ? plan_all_gather_gemm(own, slices, axis)
                             : plan_sliced_all_gather_gemm(own, slices, num_slices, axis);
    });
    expect_run_through(plans);
    if (HasFailure()) return;
  }
}

TEST_F(ArrivalsTest, TailFreeReduceScatterRunsThroughOnAllRanks) {
  for (int i = 0; i < 150; ++i) {
    const auto world_size = static_cast<std::int32_t>(pick(1, 9));
    const PlanOptions options = test::small_product(world_size, pick(0, 400), pick(0, 100), pick(0, 40));
    const SliceOptions slices = random_slices(options.m, world_size);
    SCOPED_TRACE(
        fmt::format("{} ranks, m={} n={}, {} parts", world_size, options.m, options.n, slices.parts));
    const auto plans =
        plans_of(options, [&](const PlanOptions& own) { return plan_tail_free_reduce_scatter(own, slices); });
    expect_run_through(plans);
    if (HasFailure()) return;
  }
}

TEST_F(ArrivalsTest, HeadsRunThroughOnAllRanks) {
  for (int i = 0; i < 150; ++i) {
    const auto world_size = static_cast<std::int32_t>(pick(1, 9));
    const PlanOptions options = test::small_product(world_size, pick(0, 300), pick(0, 300), pick(0, 40));
    const HeadSlices heads{random_slices(options.m, world_size), random_slices(options.n, world_size)};
    SCOPED_TRACE(
        fmt::format("{} ranks, m={} n={}, {} parts", world_size, options.m, options.n, heads.columns.parts));
    const auto plans =
        plans_of(options, [&](const PlanOptions& own) { return plan_gemm_all_to_all(own, heads); });
    expect_run_through(plans);
    if (HasFailure()) return;
  }
}

TEST_F(ArrivalsTest, BlocksRunThroughOnAllRanks) {
  for (int i = 0; i < 150; ++i) {
    const auto world_size = static_cast<std::int32_t>(pick(1, 9));
    const PlanOptions options = test::small_product(world_size, pick(0, 300), pick(0, 100), pick(0, 80));
    const HeadSlices heads{random_slices(options.m, world_size), random_slices(options.k, world_size)};
    const std::int64_t num_slices = pick(0, 3);  // 0: by messages, else by so many collectives
    SCOPED_TRACE(fmt::format("{} ranks, m={} k={}, {} parts, {} slices", world_size, options.m, options.k,
                             heads.columns.parts, num_slices));
    const auto plans = plans_of(options, [&](const PlanOptions& own) {
      return num_slices == 0 ? plan_all_to_all_gemm(own, heads)
                             : plan_sliced_all_to_all_gemm(own, heads, num_slices);
    });
    expect_run_through(plans);
    if (HasFailure()) return;
  }
}

// Three ranks, two strips of one row of two tiles; the first strip comes from all before the second.
TEST_F(ArrivalsTest, TilesTakeBlocksAsTheyArrive) {
  const HeadSlices heads{.rows = {}, .columns = {.sizes = {}, .parts = 2}};
  for (const OverlapPlan& plan :
       plans_of(test::small_product(3, 3 * 32, 48, 24),
                [&](const PlanOptions& own) { return plan_all_to_all_gemm(own, heads); })) {
    const GateTables tables = gate_tables(plan, transfer_steps(plan));
    EXPECT_EQ(tables.blocks, 3);
    EXPECT_EQ(tables.start, (std::vector<std::uint32_t>{0, 1, 2, 0, 1, 2, 0, 3, 4, 0, 3, 4}));
    EXPECT_FALSE(tables.waits_for_all);
    EXPECT_EQ(start_with_begun(tables, 2),
              (std::vector<std::uint32_t>{0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 1, 2, 0, 3, 4, 0, 3, 4}));
  }
}

// Three ranks with a third of the columns each, four strips of one row of two tiles: while the columns of a
// strip arrive, the own ones of twice as many tiles are computed.
TEST_F(ArrivalsTest, TilesAreBegunWhileTheFirstStripArrives) {
  const HeadSlices heads{.rows = {}, .columns = {.sizes = {}, .parts = 4}};
  const auto begun_of = [](const OverlapPlan& plan, std::int64_t turn) {
    return tiles_to_begin(plan, gate_tables(plan, transfer_steps(plan)), turn);
  };
  for (const OverlapPlan& plan :
       plans_of(test::small_product(3, 3 * 64, 48, 24),
                [&](const PlanOptions& own) { return plan_all_to_all_gemm(own, heads); })) {
    EXPECT_EQ(begun_of(plan, 1), 4);
    EXPECT_EQ(begun_of(plan, 2), 4);
    EXPECT_EQ(begun_of(plan, 3), 3);
    EXPECT_EQ(begun_of(plan, 5), 5);  // at least a turn
    EXPECT_EQ(begun_of(plan, 9), 0);
  }
  // Half of the tiles where columns arrive in one strip; none where there are no blocks.
  const HeadSlices whole{.rows = {}, .columns = {.sizes = {}, .parts = 1}};
  for (const OverlapPlan& plan :
       plans_of(test::small_product(3, 3 * 64, 48, 24),
                [&](const PlanOptions& own) { return plan_all_to_all_gemm(own, whole); })) {
    EXPECT_EQ(begun_of(plan, 1), 4);
  }
  for (const OverlapPlan& plan : plans_of(test::small_product(3, 3 * 64, 48, 24), [](const PlanOptions& own) {
         return plan_all_gather_gemm(own, {});
       })) {
    EXPECT_EQ(begun_of(plan, 1), 0);
  }
}

TEST_F(ArrivalsTest, SerialPlansWaitForAll) {
  for (const OverlapPlan& plan : plans_of(test::small_product(3, 96, 48, 24), [](const PlanOptions& own) {
         return plan_serial_all_to_all_gemm(own, {});
       })) {
    EXPECT_TRUE(gate_tables(plan, transfer_steps(plan)).waits_for_all);
  }
  for (const OverlapPlan& plan : plans_of(test::small_product(3, 96, 48, 24), [](const PlanOptions& own) {
         return plan_all_gather_gemm(own, {});
       })) {
    EXPECT_FALSE(gate_tables(plan, transfer_steps(plan)).waits_for_all);
  }
}

// Three ranks with two rows of two tiles each.
TEST_F(ArrivalsTest, TheOwnSliceAddsTheOtherRanksTiles) {
  const auto plans = plans_of(test::small_product(3, 3 * 32, 48, 8), [](const PlanOptions& own) {
    return plan_tail_free_reduce_scatter(own, {.sizes = {}, .parts = 1});
  });
  for (const OverlapPlan& plan : plans) {
    const GateTables tables = gate_tables(plan, transfer_steps(plan));
    EXPECT_EQ(tables.finish, (std::vector<std::uint32_t>{0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2}));
    const std::int64_t slice = 32 * 48, tile = 16 * 24;
    std::vector<std::int64_t> added(16, -1);  // eight tiles are sent away
    for (std::int64_t t = 0; t < 4; ++t) added.insert(added.end(), {t * tile, slice + t * tile});
    EXPECT_EQ(tables.added, added);
  }
}

// What the pairs are for, and that the walk above can get stuck.
TEST_F(ArrivalsTest, OneMessageAtATimeWouldNotRunThrough) {
  const auto plans = plans_of(test::small_product(3, 96, 48, 8),
                              [](const PlanOptions& own) { return plan_all_gather_gemm(own, {}); });
  std::vector<std::vector<TransferStep>> single;
  for (const OverlapPlan& plan : plans) {
    auto& steps = single.emplace_back();
    std::uint32_t arrivals = 0;
    for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
      const bool is_send = plan.transfers[i].kind == TransferKind::kSend;
      if (!is_send) ++arrivals;
      steps.push_back({.send = is_send ? static_cast<std::int64_t>(i) : -1,
                       .receive = is_send ? -1 : static_cast<std::int64_t>(i),
                       .arrivals = arrivals,
                       .brings_slice = !is_send});
    }
  }
  EXPECT_EQ(stuck_ranks(plans, single), (std::vector<std::size_t>{0, 1, 2}));
}

TEST_F(ArrivalsTest, TheOwnSliceStartsAtOnceAndOthersWaitInTurn) {
  const auto plans = plans_of(test::small_product(4, 64, 24, 8),
                              [](const PlanOptions& own) { return plan_all_gather_gemm(own, {}); });
  for (const OverlapPlan& plan : plans) {
    EXPECT_EQ(gate_tables(plan, transfer_steps(plan)).start, (std::vector<std::uint32_t>{0, 1, 2, 3}));
  }
}

TEST_F(ArrivalsTest, CollectivesAfterGroupsStayAsTheyAre) {
  PlanOptions options = test::small_product(2, 128, 96, 8);
  const OverlapPlan plan = plan_all_reduce(options);
  const auto steps = transfer_steps(plan);
  ASSERT_GT(plan.transfers.size(), 1U);
  ASSERT_EQ(steps.size(), plan.transfers.size());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i].collective, static_cast<std::int64_t>(i));
    EXPECT_FALSE(steps[i].brings_slice);
  }
  EXPECT_TRUE(gate_tables(plan, steps).start.empty());
}

TEST_F(ArrivalsTest, WhatTheExecutorCannotDoIsRefused) {
  const PlanOptions options = test::small_product(2, 128, 96, 8);
  const auto refused = [](const OverlapPlan& plan) {
    return message_of(ErrorKind::kUnsupported, [&] { (void)gate_tables(plan, transfer_steps(plan)); });
  };
  OverlapPlan early = plan_tail_free_reduce_scatter(options, {});
  std::ranges::reverse(early.schedule);  // the own slice first
  EXPECT_NE(
      refused(early).find("transfer 0 of the plan of gemm-reduce-scatter follows group 0, and position 0"),
      std::string::npos)
      << refused(early);

  OverlapPlan both = plan_tail_free_reduce_scatter(options, {});
  both.gates.back().point = GatePoint::kStart;
  EXPECT_NE(refused(both).find("has gates of both kinds"), std::string::npos);

  OverlapPlan own = plan_tail_free_reduce_scatter(options, {});
  own.slices[index(own.gates.front().slice)].source = own.rank;
  EXPECT_NE(refused(own).find("adds one of rank 0"), std::string::npos) << refused(own);

  OverlapPlan twice = plan_tail_free_reduce_scatter(options, {});
  twice.gates.insert(twice.gates.begin(), twice.gates.front());
  EXPECT_NE(refused(twice).find("adds a second one of rank 1"), std::string::npos) << refused(twice);

  PlanOptions three = options;
  three.world_size = 3;
  OverlapPlan too_few = plan_tail_free_reduce_scatter(three, {});
  too_few.gates.erase(too_few.gates.begin());
  EXPECT_NE(refused(too_few).find("adds 1 of 2"), std::string::npos) << refused(too_few);

  OverlapPlan in_the_middle = plan_all_gather_gemm(options, {});
  in_the_middle.gates.front().k_begin = 4;
  EXPECT_NE(refused(in_the_middle).find("waits for slice 0 from column 4 on"), std::string::npos);

  OverlapPlan no_source = plan_all_gather_gemm(options, {});
  for (Transfer& transfer : no_source.transfers) transfer.slice = -1;
  EXPECT_NE(refused(no_source).find("brings slice 0"), std::string::npos);

  OverlapPlan forwarded = plan_all_gather_gemm(options, {});
  forwarded.transfers.front().trigger = {TriggerKind::kSlice, 0};
  EXPECT_NE(refused(forwarded).find("no transfer set off by a slice yet"), std::string::npos);

  OverlapPlan spread = plan_sliced_all_gather_gemm(options, {}, 2);
  ASSERT_EQ(spread.transfers.size(), 2U);
  spread.transfers.back().channel = 1;
  EXPECT_NE(refused(spread).find("channels 0 and 1"), std::string::npos);
}

}  // namespace
}  // namespace flashoverlap::cuda

#include <gtest/gtest.h>

#include <functional>

#include "flashoverlap/plan_builders.h"
#include "plan/hand_made.h"
#include "plan/random_plans.h"
#include "support/seed.h"

namespace flashoverlap::test {
namespace {

using Plans = std::vector<OverlapPlan>;

std::string reason_of(const Plans& plans) {
  return verify(std::span<const OverlapPlan>(plans)).reason;
}

struct Mutation {
  const char* name;
  std::function<void(Plans&)> apply;
  std::string reason;  ///< Contained in the reason given.
};

void expect_refused(const Plans& valid, const std::vector<Mutation>& mutations) {
  ASSERT_EQ(reason_of(valid), "");
  for (const Mutation& mutation : mutations) {
    SCOPED_TRACE(mutation.name);
    Plans plans = valid;
    mutation.apply(plans);
    const std::string reason = reason_of(plans);
    EXPECT_NE(reason.find(mutation.reason), std::string::npos)
        << "reason: " << reason << "\nexpected: " << mutation.reason;
  }
}

Plans build(PlanCase::Operation operation, std::int64_t m = 8) {
  PlanCase c;
  c.operation = operation;
  c.options.world_size = 2;
  c.options.m = m;
  c.options.n = 6;
  c.options.k = 4;
  c.options.tile_m = 4;
  c.options.tile_n = 4;
  c.options.partition = {1, 2, 1};
  c.routing.destinations = {{0, 1, 1, 0, 1, 1, 0, 0}, {0, 0, 1}};
  return c.plans();
}

void set_region(Transfer& t, std::int64_t offset, std::int64_t count) {
  t.source = t.destination = {BufferKind::kPacked, offset, count};
}

TEST(VerifyRanksTest, HandMadePlansOfTheOtherSystemsHold) {
  EXPECT_EQ(reason_of(all_gather_gemm()), "");
  EXPECT_EQ(reason_of(tail_free_reduce_scatter()), "");
  EXPECT_EQ(reason_of(put_to_owners()), "");
}

TEST(VerifyRanksTest, Agreement) {
  EXPECT_EQ(reason_of({}), "there is no plan: a world has at least 1 rank");
  expect_refused(
      build(PlanCase::Operation::kAllReduce),
      {{"one missing", [](Plans& p) { p.pop_back(); },
        "rank 0: world_size is 2, but there are plans of 1 ranks"},
       {"order", [](Plans& p) { std::swap(p[0], p[1]); }, "plan 0 is that of rank 1"},
       {"operation", [](Plans& p) { p[1].operation = "other"; },
        "rank 0 plans gemm-all-reduce, but rank 1 plans other"},
       {"type", [](Plans& p) { p[1].dtype = DType::kFloat16; }, "rank 0 plans for f32, but rank 1 for f16"},
       {"hash", [](Plans& p) { p[1].agreement ^= 1; }, "shapes, types, tiles, partitions or routings differ"},
       {"alone", [](Plans& p) { p[1].schedule[0] = 9; }, "rank 1: position 0 of the schedule holds tile 9"}});
}

TEST(VerifyRanksTest, Collectives) {
  expect_refused(build(PlanCase::Operation::kAllReduce),
                 {{"order", [](Plans& p) { std::swap(p[1].transfers[0], p[1].transfers[1]); },
                   "transfer 0 (all-reduce after group 0) of rank 0 has a number of elements of 16, but "
                   "transfer 0 (all-reduce after "
                   "group 1) of rank 1 has 24"},
                  {"count",
                   [](Plans& p) {
                     p[1].transfers[2].trigger.index = 2;
                     set_region(p[1].transfers[1], 16, 32);
                     p[1].transfers[1].trigger.index = 2;
                     p[1].groups = {{0, 1}, {1, 0}, {1, 3}};
                     p[1].transfers.pop_back();
                   },
                   "a number of elements of 24"},
                  {"missing",
                   [](Plans& p) {
                     // Rank 1 splits its last transfer in two.
                     set_region(p[1].transfers[2], 40, 8);
                     p[1].transfers.push_back(p[1].transfers[2]);
                     set_region(p[1].transfers[3], 48, 0);
                   },
                   "channel 0: rank 0 has 3 collectives, but rank 1 has 4"},
                  {"channel",
                   [](Plans& p) {
                     for (Transfer& t : p[1].transfers) t.channel = 1;
                   },
                   "channel 0: rank 0 has 3 collectives, but rank 1 has 0"},
                  {"other tiles",
                   [](Plans& p) {
                     std::swap(p[1].placement.segments[0].offset, p[1].placement.segments[2].offset);
                     std::swap(p[1].restore.pieces[0].offset, p[1].restore.pieces[2].offset);
                     std::swap(p[1].schedule[0], p[1].schedule[2]);
                   },
                   "transfer 0 (all-reduce after group 0) of rank 0 and transfer 0 (all-reduce after group "
                   "0) of rank 1 add up different "
                   "parts of the product"}});
  expect_refused(build(PlanCase::Operation::kBlockCyclic, 7),
                 {{"kind",
                   [](Plans& p) {
                     Transfer& t = p[1].transfers[0];
                     t.kind = TransferKind::kAllReduce;
                     t.destination = t.source;
                     t.send_counts.clear();
                   },
                   "rank 1: transfer 0 (all-reduce after group 0) leaves 16 elements"}});
}

TEST(VerifyRanksTest, AllToAllCounts) {
  expect_refused(
      build(PlanCase::Operation::kAllToAll),
      {{"sent is not received",
        [](Plans& p) {
          auto& counts = p[0].transfers[0].send_counts;
          --counts[0], ++counts[1];
        },
        "transfer 0 (all-to-all after group 0) of rank 0 sends 7 elements to rank 0, but transfer 0 "
        "(all-to-all after "
        "group 0) of rank 0 receives 8 from it"},
       {"rows exchanged",
        [](Plans& p) { std::swap(p[0].restore.bands[0].first_piece, p[0].restore.bands[1].first_piece); },
        "rank 0: restore band 1 has row 0 of rank 0 after row 7 of rank 0"}});
}

TEST(VerifyRanksTest, SendsAndReceives) {
  expect_refused(
      all_gather_gemm(),
      {{"never sent", [](Plans& p) { p[1].transfers.erase(p[1].transfers.begin()); },
        "channel 1: rank 1 sends 0 times to rank 0, which receives 1 times from it"},
       {"sent twice", [](Plans& p) { p[1].transfers.push_back(p[1].transfers[0]); },
        "rank 1 sends 2 times to rank 0, which receives 1 times"},
       {"size", [](Plans& p) { p[1].transfers[0].source.count = 3; },
        "sends 3 elements, but transfer 1 (receive from rank 1 at the start) of rank 0 receives 4"},
       {"channel", [](Plans& p) { p[1].transfers[0].channel = 5; },
        "channel 1: rank 1 sends 0 times to rank 0"},
       {"messages", [](Plans& p) { p[1].messages_per_pair = 1; },
        "rank 0 has messages_per_pair 0, but rank 1 has 1"}});
}

TEST(VerifyRanksTest, Puts) {
  expect_refused(put_to_owners(),
                 {{"dropped",
                   [](Plans& p) {
                     // The tile's row still leaves by another put, so rank 0's plan holds on its own.
                     p[0].transfers[0].slice = 2;
                     p[0].transfers[0].destination.offset = 8;
                   },
                   "slice 2 of rank 1 arrives twice: by transfer 0 (put to rank 1 after group 0) of rank 0 "
                   "and by transfer 2 (put to rank 1 "
                   "after group 1) of rank 0"},
                  {"never", [](Plans& p) { p[0].transfers[0].source = p[0].transfers[1].source; },
                   "rank 0: tile 0 of group 0"},
                  {"slice", [](Plans& p) { p[0].transfers[0].slice = 4; },
                   "marks slice 4 as arrived, which is not in [0, 4)"},
                  {"place", [](Plans& p) { p[0].transfers[0].destination.offset = 2; },
                   "rank 0: transfer 0 (put to rank 1 after group 0) writes elements [2, 6) of the received "
                   "buffer for slice 0, but there that is elements [0, 4)"},
                  {"outside", [](Plans& p) { p[0].transfers[0].destination.offset = 13; },
                   "has offset 13 and count 4, outside the received buffer of 16 elements"}});
  Plans plans = put_to_owners();
  plans[1].slices.push_back({0, {BufferKind::kReceived, 16, 0}});
  EXPECT_EQ(reason_of(plans),
            "slice 4 of rank 1 never arrives: no transfer here brings it, and rank 0 does not put it");
}

TEST(VerifyRanksTest, AddedTilesAreTheSamePartOfTheProduct) {
  Plans plans = tail_free_reduce_scatter();
  // Rank 1 sends its own tile instead, with the gate on the other: each plan holds on its own.
  plans[1].schedule = {1, 0};
  plans[1].placement.segments = {{0, 2, 8}, {0, 2, 0}};
  plans[1].gates[0].tile = 0;
  EXPECT_EQ(reason_of(plans), "rank 0: gate 0 of tile 0 adds row 2 of rank 1 to row 0");
}

// Both ranks first want to receive what the other one only computes after it has received.
TEST(VerifyRanksTest, CrossingSendsAndReceivesOnOneChannelDeadlock) {
  Plans plans = tail_free_reduce_scatter();
  for (OverlapPlan& plan : plans) {
    for (Transfer& t : plan.transfers) t.channel = 0;
    plan.schedule = {plan.rank, 1 - plan.rank};  // The gated tile first.
    plan.groups = {{0, 1}, {1, 1}};
    std::swap(plan.placement.segments[0].offset, plan.placement.segments[1].offset);
    plan.restore.pieces[0].offset = 0;
    plan.transfers[1].source.offset = 8;
    plan.transfers[1].trigger.index = 1;
    EXPECT_EQ(verify(plan).reason, "");
  }
  EXPECT_EQ(reason_of(plans),
            "deadlock: rank 0: tile 0 at position 0 waits for slice 0 from rank 1; rank 0 channel 0: "
            "transfer 0 (receive from rank "
            "1 at the start) waits for transfer 1 (send to rank 0 after group 1) of rank 1; rank 1: tile 1 "
            "at position 0 waits for "
            "slice 0 from rank 0; rank 1 channel 0: transfer 0 (receive from rank 0 at the start) waits for "
            "transfer 1 (send to "
            "rank 1 after group 1) of rank 0");
}

TEST(VerifyRanksTest, SendsMustNotRelyOnBuffers) {
  Plans plans = all_gather_gemm();
  for (OverlapPlan& plan : plans) {
    for (Transfer& t : plan.transfers) t.channel = 0;
  }
  EXPECT_EQ(
      reason_of(plans).rfind(
          "deadlock: rank 0: tile 1 at position 1 waits for slice 0 from rank 1; rank 0 channel 0: transfer "
          "0 "
          "(send to rank 1 at the start) waits for transfer 1 (receive from rank 0 at the start) of rank 1",
          0),
      0U)
      << reason_of(plans);
  std::swap(plans[1].transfers[0], plans[1].transfers[1]);
  EXPECT_EQ(reason_of(plans), "");
}

TEST(VerifyRanksTest, CollectivesAndPointToPointInCrossingOrderDeadlock) {
  Plans plans = all_gather_gemm();
  for (OverlapPlan& plan : plans) {
    Transfer all_reduce;
    all_reduce.source = all_reduce.destination = {BufferKind::kOutput, 0, 0};
    all_reduce.channel = 0;
    plan.transfers.insert(plan.transfers.begin() + plan.rank * 2, all_reduce);
    for (Transfer& t : plan.transfers) t.channel = 0;
  }
  std::swap(plans[0].transfers[1], plans[0].transfers[2]);
  EXPECT_NE(reason_of(plans).find("transfer 0 (all-reduce at the start) waits for rank 1"), std::string::npos)
      << reason_of(plans);
}

class RandomMutationTest : public SeededTest {
 protected:
  /// Changes one number of one rank's plan to another that may occur there.
  std::string mutate(OverlapPlan& plan) {
    std::vector<std::pair<const char*, std::int64_t*>> numbers;
    for (auto& t : plan.schedule) numbers.emplace_back("schedule", &t);
    for (auto& g : plan.groups) {
      numbers.emplace_back("first_position", &g.first_position);
      numbers.emplace_back("num_tiles", &g.num_tiles);
    }
    for (auto& s : plan.placement.segments) {
      numbers.emplace_back("segment row", &s.row_begin);
      numbers.emplace_back("segment rows", &s.rows);
      numbers.emplace_back("segment offset", &s.offset);
    }
    for (auto& t : plan.transfers) {
      numbers.emplace_back("source offset", &t.source.offset);
      numbers.emplace_back("source count", &t.source.count);
      numbers.emplace_back("destination offset", &t.destination.offset);
      numbers.emplace_back("destination count", &t.destination.count);
      for (auto& c : t.send_counts) numbers.emplace_back("send count", &c);
      for (auto& c : t.receive_counts) numbers.emplace_back("receive count", &c);
    }
    for (auto& b : plan.restore.bands) {
      numbers.emplace_back("band row", &b.row_begin);
      numbers.emplace_back("band rows", &b.rows);
      numbers.emplace_back("band first piece", &b.first_piece);
      numbers.emplace_back("band pieces", &b.num_pieces);
    }
    for (auto& p : plan.restore.pieces) {
      numbers.emplace_back("piece column", &p.col_begin);
      numbers.emplace_back("piece columns", &p.cols);
      numbers.emplace_back("piece offset", &p.offset);
    }
    numbers.emplace_back("packed_size", &plan.packed_size);
    numbers.emplace_back("received_size", &plan.received_size);
    numbers.emplace_back("output_rows", &plan.output_rows);
    numbers.emplace_back("output_cols", &plan.output_cols);
    const auto& [name, number] = numbers[static_cast<std::size_t>(pick(0, std::ssize(numbers) - 1))];
    const std::int64_t before = *number;
    *number += pick(1, 3) * (pick(0, 1) == 0 ? 1 : -1);
    return fmt::format("{} from {} to {}", name, before, *number);
  }
};

// What a mutation may change without harm: a restore is complete whatever an empty plan's sizes say, and an
// empty transfer may lie anywhere. All else must be noticed.
TEST_F(RandomMutationTest, AnyChangedNumberIsNoticed) {
  RandomPlans random(rng_);
  int mutations = 0;
  while (mutations < 3000) {
    PlanCase c = random.next();
    if (c.options.n == 0 || c.waves() == 0) continue;
    SCOPED_TRACE(c.text());
    Plans plans = c.plans();
    OverlapPlan& plan = plans[static_cast<std::size_t>(pick(0, c.options.world_size - 1))];
    if (plan.output_rows == 0 || plan.schedule.empty()) continue;
    const std::string what = mutate(plan);
    ++mutations;
    const std::string reason = reason_of(plans);
    const bool empty_transfer = std::ranges::any_of(
        plan.transfers, [](const Transfer& t) { return t.source.count == 0 || t.destination.count == 0; });
    // Spare room at the end of the received buffer, other groups of a plan that sends nothing, or an empty
    // region elsewhere.
    const bool harmless =
        what.rfind("received_size", 0) == 0 || (empty_transfer && what.find("offset") != std::string::npos);
    if (harmless) continue;
    ASSERT_NE(reason, "") << "rank " << plan.rank << ": " << what;
  }
}

}  // namespace
}  // namespace flashoverlap::test

#include <gtest/gtest.h>

#include <algorithm>

#include "flashoverlap/simulator.h"
#include "sim/gather_plan.h"
#include "support/throws.h"

/// Plans with gates, sends and receives.
namespace flashoverlap {
namespace {

constexpr std::int64_t kRows = 100;
constexpr std::int64_t kDepth = 50;
constexpr double kTileUs = 100 * 100 * 2 * 50 / 1e3 / 100;  // 10 us at 100 GFLOP/s
constexpr double kSliceBytes = 100 * 50 * 4;

MachineProfile machine(double bandwidth_gbps, double latency_us) {
  MachineProfile profile;
  profile.name = "messages";
  profile.gemm.kernels = {{DType::kFloat32, kRows, kRows, 0, 100, RaggedTiles::kProportional, "test"}};
  profile.levels = {{.name = "link",
                     .ranks = 0,
                     .latency_us = latency_us,
                     .bandwidth_gbps = bandwidth_gbps,
                     .source = "test"}};
  return profile;
}

std::vector<OverlapPlan> plans_of(std::int32_t ranks) {
  std::vector<OverlapPlan> plans;
  for (std::int32_t rank = 0; rank < ranks; ++rank)
    plans.push_back(test::gather_plan(rank, ranks, kRows, kDepth));
  return plans;
}

TEST(SimulatorMessages, TheTestPlansHold) {
  const std::vector<OverlapPlan> plans = plans_of(3);
  EXPECT_EQ(verify(plans).reason, "");
}

TEST(SimulatorMessages, ArrivalsInTimeAreHidden) {
  const std::vector<OverlapPlan> plans = plans_of(3);
  // 1 us + 5 us a slice alone; two at once share the rank's port and take 10.
  const SimulationResult result = simulate(plans, machine(kSliceBytes / 5e3, 1));
  EXPECT_NEAR(result.total_us, 3 * kTileUs, 1e-9);
  EXPECT_EQ(result.ranks[0].exposed_us, 0);
  EXPECT_NEAR(result.ranks[1].idle_fraction, 0, 1e-12);
  EXPECT_EQ(result.ranks[1].sent_bytes, 2 * static_cast<std::int64_t>(kSliceBytes));
  EXPECT_EQ(result.ranks[1].received_bytes, 2 * static_cast<std::int64_t>(kSliceBytes));
}

TEST(SimulatorMessages, LatencyOfAMessageIsThatOfTwoRanksHoweverManyThereAre) {
  const std::vector<OverlapPlan> plans = plans_of(5);
  MachineProfile grows = machine(kSliceBytes / 5e3, 100);
  const double plain = simulate(plans, grows).total_us;
  grows.levels[0].latency_grows = true;
  EXPECT_EQ(simulate(plans, grows).total_us, plain);
}

TEST(SimulatorMessages, LateArrivalsHoldTilesUp) {
  const std::vector<OverlapPlan> plans = plans_of(2);
  const SimulationResult result = simulate(plans, machine(kSliceBytes / 20e3, 5));  // 25 us a slice
  EXPECT_NEAR(result.total_us, 25 + kTileUs, 1e-9);
  EXPECT_NEAR(result.ranks[0].idle_fraction, 1 - 20.0 / 35, 1e-9);
  EXPECT_NEAR(result.ranks[0].communicating_us, 25, 1e-9);
}

TEST(SimulatorMessages, GatesInsideTheMainLoopLetItsFirstPartRun) {
  // Not a plan that verify passes (rows of A are needed from the start), but one that the timing can be seen
  // on: a finish gate.
  std::vector<OverlapPlan> plans = plans_of(2);
  for (OverlapPlan& plan : plans) {
    plan.slices[0].region = {BufferKind::kReceived, 0, kRows * kRows};
    plan.received_size = kRows * kRows;
    plan.gates[0].point = GatePoint::kFinish;
    for (Transfer& transfer : plan.transfers) {
      if (transfer.kind == TransferKind::kReceive) {
        transfer.destination = plan.slices[0].region;
      } else {
        transfer.source.count = kRows * kRows;
        transfer.source.offset = 0;
      }
    }
  }
  const double slice_us = 100 * 100 * 4 / (kSliceBytes / 20.0);
  EXPECT_NEAR(simulate(plans, machine(kSliceBytes / 20e3, 0)).total_us, std::max(2 * kTileUs, slice_us),
              1e-9);
}

TEST(SimulatorMessages, TransfersThatShareAPortShareItsBandwidth) {
  const SimulationResult shared = simulate(plans_of(3), machine(kSliceBytes / 20e3, 0));
  // Each rank sends two slices of 20 us at once: both arrive at 40.
  EXPECT_NEAR(shared.total_us, 40 + 2 * kTileUs, 1e-9);
}

TEST(SimulatorMessages, ALevelBetweenNodesIsSlower) {
  MachineProfile profile = machine(kSliceBytes / 2e3, 0);  // 2 us inside a node of two ranks
  profile.levels[0].ranks = 2;
  profile.levels.push_back({.name = "net",
                            .ranks = 0,
                            .ports = 1,
                            .latency_us = 0,
                            .bandwidth_gbps = kSliceBytes / 100e3,
                            .source = "test"});
  // Ranks 0 and 2 take the slices from afar first, and their neighbours last. Each node's one port carries 2
  // ranks x 2 slices of 100 us each out; the two directions do not share.
  EXPECT_NEAR(simulate(plans_of(4), profile).total_us, 400 + 3 * kTileUs, 1e-6);
}

TEST(SimulatorMessages, ThePathNamesTheSliceAndItsSender) {
  const std::vector<OverlapPlan> plans = plans_of(2);
  const SimulationResult result = simulate(plans, machine(kSliceBytes / 20e3, 5));
  ASSERT_EQ(result.critical_path.size(), 2U);
  EXPECT_EQ(result.critical_path[0],
            "rank 0's last tile is done at 35.0 us, after all its communication; slice 0 held it up");
  EXPECT_EQ(result.critical_path[1], "rank 0's receive from rank 1 (0.0 to 25.0 us) begins with the call");
}

TEST(SimulatorMessages, ADeadlockIsNamed) {
  // Both ranks receive before they send, on one channel.
  std::vector<OverlapPlan> plans = plans_of(2);
  for (OverlapPlan& plan : plans) {
    for (Transfer& transfer : plan.transfers) transfer.channel = 0;
    std::swap(plan.transfers[0], plan.transfers[1]);
  }
  const std::string message =
      test::message_of(ErrorKind::kBadArgument, [&] { static_cast<void>(simulate(plans, machine(1, 0))); });
  EXPECT_EQ(message,
            "deadlock: 2 of 2 ranks cannot go on; rank 0: tile 1 (wave 1) waits for slice 0 from rank 1, "
            "channel 0 at receive "
            "from rank 1, which waits for rank 1's side of it; rank 1: tile 0 (wave 1) waits for slice 0 "
            "from rank 0, "
            "channel 0 at receive from rank 0, which waits for rank 0's side of it");
}

TEST(SimulatorMessages, MessagesOfDifferentSizeAreNamed) {
  std::vector<OverlapPlan> plans = plans_of(2);
  plans[0].transfers[0].source.count -= 10;
  const std::string message =
      test::message_of(ErrorKind::kBadArgument, [&] { static_cast<void>(simulate(plans, machine(1, 0))); });
  EXPECT_NE(message.find("has 20000 bytes"), std::string::npos) << message;
  EXPECT_NE(message.find("has 19960"), std::string::npos) << message;
}

}  // namespace
}  // namespace flashoverlap

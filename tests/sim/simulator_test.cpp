#include "flashoverlap/simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "flashoverlap/plan_builders.h"
#include "flashoverlap/predictor.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap {
namespace {

using test::SeededTest;

/// Tiles of 64 x 64 at 64 * 64 * 2 * k / 8192 us, links of 1 GB/s with 3 us latency.
MachineProfile plain_machine() {
  MachineProfile machine;
  machine.name = "plain";
  machine.units = 64;
  machine.gemm.launch_us = 5;
  machine.gemm.kernels = {{DType::kFloat32, 64, 64, 1.5, 8.192, RaggedTiles::kProportional, "test"}};
  machine.signal_us = 2;
  machine.levels = {{.name = "link", .ranks = 0, .latency_us = 3, .bandwidth_gbps = 1, .source = "test"}};
  return machine;
}

PlanOptions problem(std::int64_t waves, std::int64_t units, std::int64_t ranks) {
  PlanOptions options{.world_size = static_cast<std::int32_t>(ranks),
                      .m = 64 * units,
                      .n = 64 * waves,
                      .k = 32,
                      .tile_m = 64,
                      .tile_n = 64,
                      .resources = {},
                      .partition = {}};
  options.resources.compute_units = units;
  options.swizzle = units;
  return options;
}

enum class Collective { kAllReduce, kReduceScatter };

OverlapPlan make_plan(PlanOptions options, Collective collective, std::vector<std::int64_t> partition) {
  options.partition = std::move(partition);
  return collective == Collective::kAllReduce ? plan_all_reduce(options)
                                              : plan_reduce_scatter(options, RowOwnership::kBlockCyclic);
}

class Simulator : public SeededTest {
 protected:
  std::vector<std::int64_t> random_partition(std::int64_t waves) {
    std::vector<std::int64_t> partition;
    while (waves > 0) {
      partition.push_back(pick(1, waves));
      waves -= partition.back();
    }
    return partition;
  }

  MachineProfile random_machine() {
    MachineProfile machine = plain_machine();
    machine.gemm.launch_us = static_cast<double>(pick(0, 900)) / 7;
    machine.gemm.kernels[0].overhead_us = static_cast<double>(pick(0, 900)) / 77;
    machine.gemm.kernels[0].unit_gflops = static_cast<double>(pick(1, 900)) / 13;
    machine.signal_us = static_cast<double>(pick(0, 90)) / 13;
    machine.restore_us_per_mib = static_cast<double>(pick(0, 900)) / 13;
    machine.levels[0].latency_us = static_cast<double>(pick(0, 900)) / 13;
    machine.levels[0].bandwidth_gbps = static_cast<double>(pick(1, 900)) / 113;
    return machine;
  }
};

TEST_F(Simulator, EqualsThePredictorToTheLastBitWithoutContention) {
  for (int round = 0; round < 150; ++round) {
    const std::int64_t waves = pick(1, 12);
    const std::int64_t ranks = pick(2, 5);
    const MachineProfile machine = random_machine();
    PlanOptions options = problem(waves, pick(1, 6), ranks);
    if (pick(0, 1) == 0) options.m -= pick(0, 63);  // ragged tiles
    if (pick(0, 1) == 0) options.n -= pick(0, 63);
    const Collective collective = pick(0, 1) == 0 ? Collective::kAllReduce : Collective::kReduceScatter;
    const std::vector<std::int64_t> partition = random_partition(num_waves(options));
    const OverlapPlan finest = make_plan(
        options, collective, std::vector<std::int64_t>(static_cast<std::size_t>(num_waves(options)), 1));
    const OverlapCost cost = overlap_cost(std::vector{finest}, machine);
    const OverlapPlan plan = make_plan(options, collective, partition);
    const SimulationResult result = simulate_symmetric(plan, machine);
    const Prediction predicted = predict(cost, partition);
    ASSERT_EQ(result.total_us, predicted.total_us) << "round " << round;
    ASSERT_EQ(result.ranks[0].compute_us, predicted.compute_us) << "round " << round;
  }
}

TEST_F(Simulator, WalkingEveryTileChangesNothing) {
  for (int round = 0; round < 60; ++round) {
    PlanOptions options = problem(pick(1, 9), pick(1, 5), pick(2, 4));
    options.m -= pick(0, 63);
    MachineProfile machine = random_machine();
    if (pick(0, 1) == 0) machine.slowdown = 1.3;
    if (pick(0, 1) == 0) machine.steal_us_per_mib = 50;
    const OverlapPlan plan = make_plan(options, Collective::kAllReduce, random_partition(num_waves(options)));
    SimulationOptions settings;
    settings.jitter = pick(0, 1) == 0 ? 0 : 0.1;
    settings.slow_ranks = {{1, 1.5}};
    const SimulationResult fast = simulate_symmetric(plan, machine, settings);
    settings.walk_every_tile = true;
    const SimulationResult slow = simulate_symmetric(plan, machine, settings);
    ASSERT_NEAR(fast.total_us, slow.total_us, fast.total_us * 1e-12) << round;
    ASSERT_NEAR(fast.ranks[0].idle_fraction, slow.ranks[0].idle_fraction, 1e-9) << round;
  }
}

TEST(SimulatorClosedForm, OneGroupIsGemmThenCollective) {
  const OverlapPlan plan = make_plan(problem(4, 2, 4), Collective::kAllReduce, {4});
  const SimulationResult result = simulate_symmetric(plan, plain_machine());
  const double tile = 1.5 + 64 * 64 * 2 * 32 / 8192.0;
  const double bytes = 128 * 256 * 4;
  EXPECT_DOUBLE_EQ(result.ranks[0].compute_us, 5 + 4 * tile);
  EXPECT_NEAR(result.total_us, 5 + 4 * tile + 2 + 3 + 1.5 * bytes / 1000, 1e-9);
  EXPECT_NEAR(result.ranks[2].exposed_us, 2 + 3 + 1.5 * bytes / 1000, 1e-9);
  EXPECT_EQ(result.ranks[0].idle_fraction, 1 - 4 * tile / (5 + 4 * tile));
  EXPECT_EQ(result.ranks[0].sent_bytes, 128 * 256 * 4);
}

TEST(SimulatorClosedForm, ASlowRankHoldsEverybodyUp) {
  const OverlapPlan plan = make_plan(problem(4, 2, 3), Collective::kAllReduce, {2, 2});
  SimulationOptions options;
  options.slow_ranks = {{2, 3.0}};
  const SimulationResult result = simulate_symmetric(plan, plain_machine(), options);
  const double tile = 1.5 + 64 * 64 * 2 * 32 / 8192.0;
  const double transfer = 3 + 4.0 / 3 * (128 * 128 * 4) / 1000;
  // The slow rank's last group: ready at 5 + 12 tiles; the transfer before it is over by then or not.
  const double first = 5 + 6 * tile + 2 + transfer;
  EXPECT_NEAR(result.total_us, std::max(first, 5 + 12 * tile + 2) + transfer, 1e-9);
  ASSERT_FALSE(result.critical_path.empty());
  EXPECT_NE(result.critical_path.back().find("waits for rank 2's group"), std::string::npos)
      << result.critical_path.back();
}

TEST(SimulatorClosedForm, SlowdownHoldsOnlyWhileSomethingIsInFlight) {
  MachineProfile machine = plain_machine();
  machine.slowdown = 2;
  machine.signal_us = 0;
  machine.levels[0].latency_us = 0;
  machine.levels[0].bandwidth_gbps = 16.384;  // a wave of 64 x 64 floats, all-reduced by 2 ranks: 1 us
  const OverlapPlan plan = make_plan(problem(3, 1, 2), Collective::kAllReduce, {1, 1, 1});
  const SimulationResult result = simulate_symmetric(plan, machine);
  const double tile = 1.5 + 64 * 64 * 2 * 32 / 8192.0;
  // Each of the two transfers beside tiles costs them half of its 1 us.
  EXPECT_NEAR(result.ranks[0].compute_us, 5 + 3 * tile + 2 * 0.5, 1e-9);
  EXPECT_NEAR(result.total_us, 5 + 3 * tile + 1 + 1, 1e-9);
}

TEST(SimulatorClosedForm, StolenTimeIsPerByte) {
  MachineProfile machine = plain_machine();
  machine.signal_us = 0;
  machine.levels[0].latency_us = 0;
  machine.levels[0].bandwidth_gbps = 16.384;
  machine.steal_us_per_mib = 0.25 * 64;  // a wave is 1/64 MiB: 0.25 us each
  const OverlapPlan plan = make_plan(problem(3, 1, 2), Collective::kAllReduce, {1, 1, 1});
  const double tile = 1.5 + 64 * 64 * 2 * 32 / 8192.0;
  EXPECT_NEAR(simulate_symmetric(plan, machine).ranks[0].compute_us, 5 + 3 * tile + 2 * 0.25, 1e-9);
}

TEST(SimulatorClosedForm, OneRankOnlyComputes) {
  const OverlapPlan plan = make_plan(problem(4, 2, 1), Collective::kAllReduce, {1, 3});
  const SimulationResult result = simulate_symmetric(plan, plain_machine());
  EXPECT_EQ(result.total_us, result.ranks[0].compute_us);
  EXPECT_EQ(result.ranks[0].sent_bytes, 0);
  EXPECT_NE(result.critical_path.at(0).find("rank 0's last tile"), std::string::npos);
}

TEST(SimulatorClosedForm, NoTilesTakeNoTime) {
  PlanOptions options = problem(1, 1, 2);
  options.m = 0;
  const SimulationResult result = simulate_symmetric(plan_all_reduce(options), plain_machine());
  EXPECT_EQ(result.total_us, 0);
}

TEST_F(Simulator, BytesAreConserved) {
  for (int round = 0; round < 40; ++round) {
    const std::int64_t ranks = pick(2, 5);
    Routing routing;
    for (std::int64_t source = 0; source < ranks; ++source) {
      std::vector<std::int32_t> destinations(static_cast<std::size_t>(pick(0, 300)));
      for (std::int32_t& destination : destinations)
        destination = static_cast<std::int32_t>(pick(0, ranks - 1));
      routing.destinations.push_back(std::move(destinations));
    }
    std::vector<OverlapPlan> plans;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      PlanOptions options = problem(4, pick(1, 1), ranks);
      options.rank = static_cast<std::int32_t>(rank);
      plans.push_back(plan_all_to_all(options, routing));
    }
    const SimulationResult result = simulate(plans, plain_machine());
    std::int64_t expected_total = 0;
    std::int64_t sent_total = 0;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      std::int64_t sent = 0;
      std::int64_t received = 0;
      for (std::int64_t other = 0; other < ranks; ++other) {
        if (other == rank) continue;
        sent += routing.rows(static_cast<std::int32_t>(rank), static_cast<std::int32_t>(other)) *
                plans[0].output_cols * 4;
        received += routing.rows(static_cast<std::int32_t>(other), static_cast<std::int32_t>(rank)) *
                    plans[0].output_cols * 4;
      }
      EXPECT_EQ(result.ranks[static_cast<std::size_t>(rank)].sent_bytes, sent) << round;
      EXPECT_EQ(result.ranks[static_cast<std::size_t>(rank)].received_bytes, received) << round;
      expected_total += received;
      sent_total += result.ranks[static_cast<std::size_t>(rank)].sent_bytes;
    }
    EXPECT_EQ(sent_total, expected_total);
  }
}

TEST_F(Simulator, ASeedGivesOneResultAndAnotherSeedAnother) {
  const OverlapPlan plan = make_plan(problem(6, 4, 4), Collective::kAllReduce, {1, 2, 3});
  SimulationOptions options;
  options.jitter = 0.2;
  options.seed = 7;
  const SimulationResult first = simulate_symmetric(plan, plain_machine(), options);
  const SimulationResult again = simulate_symmetric(plan, plain_machine(), options);
  EXPECT_EQ(first.total_us, again.total_us);
  EXPECT_EQ(first.critical_path, again.critical_path);
  options.seed = 8;
  EXPECT_NE(first.total_us, simulate_symmetric(plan, plain_machine(), options).total_us);
}

TEST_F(Simulator, TheTimelineShowsEveryTileAndTransferOnce) {
  const OverlapPlan plan = make_plan(problem(5, 3, 3), Collective::kAllReduce, {2, 3});
  SimulationOptions options;
  options.timeline_ranks = 2;
  MachineProfile machine = plain_machine();
  machine.restore_us_per_mib = 10;
  const SimulationResult result = simulate_symmetric(plan, machine, options);
  std::vector<int> tiles(2, 0);
  std::vector<int> transfers(2, 0);
  std::vector<int> restores(2, 0);
  double end = 0;
  for (const Span& span : result.timeline.spans) {
    ASSERT_LT(span.rank, 2);
    EXPECT_LT(span.begin_us, span.end_us);
    if (span.kind == SpanKind::kCompute) ++tiles[static_cast<std::size_t>(span.rank)];
    if (span.kind == SpanKind::kCommunication) ++transfers[static_cast<std::size_t>(span.rank)];
    if (span.kind == SpanKind::kEpilogue) ++restores[static_cast<std::size_t>(span.rank)];
    end = std::max(end, span.end_us);
  }
  EXPECT_EQ(tiles, (std::vector<int>{15, 15}));
  EXPECT_EQ(transfers, (std::vector<int>{2, 2}));
  EXPECT_EQ(restores, (std::vector<int>{1, 1}));
  EXPECT_EQ(end, result.total_us);
}

TEST(SimulatorLevels, ACollectiveOverTwoLevelsTakesWhatTheTopologySays) {
  MachineProfile machine = plain_machine();
  machine.levels[0].ranks = 2;
  machine.levels.push_back(
      {.name = "net", .ranks = 0, .latency_us = 9, .bandwidth_gbps = 0.1, .source = "test"});
  const OverlapPlan plan = make_plan(problem(2, 2, 8), Collective::kAllReduce, {2});
  const double bytes = 128 * 128 * 4;
  // 4 nodes of 2 ranks: each rank moves half of the buffer between nodes.
  const double transfer = 3 + 9 + 2 * 0.75 * bytes / 2 / 100;
  const SimulationResult result = simulate_symmetric(plan, machine);
  EXPECT_NEAR(result.ranks[5].exposed_us, 2 + transfer, 1e-9);
}

TEST(SimulatorErrors, AreNamed) {
  const auto kind = ErrorKind::kBadArgument;
  const OverlapPlan plan = make_plan(problem(2, 2, 2), Collective::kAllReduce, {2});
  const MachineProfile machine = plain_machine();
  const auto run = [&](const SimulationOptions& options) {
    static_cast<void>(simulate_symmetric(plan, machine, options));
  };
  FLASHOVERLAP_EXPECT_THROW(kind, "no plans to simulate",
                            static_cast<void>(simulate(std::span<const OverlapPlan>{}, machine)));
  FLASHOVERLAP_EXPECT_THROW(kind, "rank 0's plan is for 2 ranks, but 1 plans were given",
                            static_cast<void>(simulate(std::vector{plan}, machine)));
  FLASHOVERLAP_EXPECT_THROW(kind, "jitter is 2, must be in [0, 1]", run({.jitter = 2, .slow_ranks = {}}));
  FLASHOVERLAP_EXPECT_THROW(kind, "slow rank 2 is not one of the 2 ranks", run({.slow_ranks = {{2, 1}}}));
  FLASHOVERLAP_EXPECT_THROW(kind, "slow rank 1 has factor 0", run({.slow_ranks = {{1, 0}}}));
  FLASHOVERLAP_EXPECT_THROW(kind, "timeline_ranks is -1", run({.slow_ranks = {}, .timeline_ranks = -1}));
  OverlapPlan broken = plan;
  broken.schedule[0] = broken.schedule[1];
  FLASHOVERLAP_EXPECT_THROW(kind, "rank 0's plan does not hold",
                            static_cast<void>(simulate_symmetric(broken, machine)));
  MachineProfile other = machine;
  other.gemm.kernels[0].dtype = DType::kFloat16;
  FLASHOVERLAP_EXPECT_THROW(kind, "no f32 GEMM kernel", static_cast<void>(simulate_symmetric(plan, other)));
}

}  // namespace
}  // namespace flashoverlap

#include "flashoverlap/overlap_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <set>
#include <vector>

#include "flashoverlap/call_tuner.h"
#include "flashoverlap/plan_builders.h"
#include "support/seed.h"
#include "support/throws.h"

// Whether a reduce-scatter is overlapped by wave groups, in slices or not at all, where a machine is known.
namespace flashoverlap::test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr std::int64_t kTile = 64;

/// Hosts of `ranks_of_host` ranks on one link to the others; a tile of k = 64 takes 65 us.
MachineProfile machine_with(double gbps, std::int64_t ranks_of_host, double host_gbps,
                            double host_latency_us = 10) {
  MachineProfile machine;
  machine.name = "hosts";
  machine.units = 4;
  machine.gemm.kernels = {{DType::kFloat32, kTile, kTile, 1, 8.192, RaggedTiles::kProportional, "test"}};
  machine.signal_us = 1;
  machine.levels = {
      {.name = "inner", .ranks = ranks_of_host, .latency_us = 3, .bandwidth_gbps = gbps, .source = "test"}};
  if (ranks_of_host > 0) {
    machine.levels.push_back({.name = "outer",
                              .ranks = 0,
                              .ports = 1,
                              .latency_us = host_latency_us,
                              .bandwidth_gbps = host_gbps,
                              .source = "test"});
  }
  return machine;
}

PlanOptions options_of(std::int32_t world_size, std::int64_t tiles_of_slice) {
  return {.world_size = world_size,
          .m = kTile * tiles_of_slice * world_size,
          .n = kTile,
          .k = kTile,
          .tile_m = kTile,
          .tile_n = kTile,
          .resources = {.compute_units = 1, .communication_units = 0},
          .partition = {}};
}

PartsRequest in_slices(const PlanOptions& options) {
  return {.operation = "test",
          .world_size = options.world_size,
          .plan = [=](std::int32_t rank, const SliceCut& cut) {
            PlanOptions own = options;
            own.rank = rank;
            return plan_tail_free_reduce_scatter(
                own, {.sizes = {}, .parts = cut.parts, .send_channels = cut.send_channels});
          }};
}

/// In groups of `group` waves.
std::function<OverlapPlan(std::int32_t)> in_groups(PlanOptions options, std::int64_t group) {
  const std::int64_t waves = num_waves_reduce_scatter(options, RowOwnership::kContiguous);
  for (std::int64_t done = 0; done < waves; done += group)
    options.partition.push_back(std::min(group, waves - done));
  return [=](std::int32_t rank) {
    PlanOptions own = options;
    own.rank = rank;
    return plan_reduce_scatter(own, RowOwnership::kContiguous);
  };
}

OverlapRequest request_of(const PlanOptions& options, std::int64_t group) {
  const std::int64_t all = num_waves_reduce_scatter(options, RowOwnership::kContiguous);
  return {.tail_free = in_slices(options),
          .signal = in_groups(options, group),
          .serial = in_groups(options, all)};
}

double simulated_us(const std::function<OverlapPlan(std::int32_t)>& plan, std::int32_t world_size,
                    const MachineProfile& machine) {
  std::vector<OverlapPlan> plans;
  for (std::int32_t rank = 0; rank < world_size; ++rank) plans.push_back(plan(rank));
  return simulate(plans, machine).total_us;
}

TEST(OverlapChoice, TailFreeWhereLinksAreAlike) {
  const OverlapChoice choice = choose_overlap(request_of(options_of(4, 16), 8), machine_with(1, 0, 0));
  EXPECT_EQ(choice.way, OverlapWay::kTailFree) << choice.reason;
  EXPECT_THAT(choice.reason, StartsWith("tail-free: "));
  EXPECT_THAT(choice.reason, HasSubstr("signal: "));
  EXPECT_THAT(choice.reason, HasSubstr("serial: "));
}

// A collective first reduces within the host, direct messages all cross to the other one.
TEST(OverlapChoice, GroupsWhereRanksOfAHostShareALink) {
  const PlanOptions options = options_of(8, 16);
  const OverlapChoice choice = choose_overlap(request_of(options, 16), machine_with(10, 4, 0.3));
  EXPECT_EQ(choice.way, OverlapWay::kSignal) << choice.reason;
  EXPECT_LT(choice.signal_us, choice.serial_us);
}

TEST(OverlapChoice, NeitherWhereTheyCostMoreThanTheyHide) {
  // Two tiles a slice, and every message and every group takes several times as long as both.
  const PlanOptions options = options_of(8, 2);
  const OverlapChoice choice = choose_overlap(request_of(options, 1), machine_with(10, 4, 0.02, 500));
  EXPECT_EQ(choice.way, OverlapWay::kSerial) << choice.reason;
  EXPECT_THAT(choice.reason, StartsWith("serial: "));
}

class RandomOverlapChoice : public SeededTest {};

TEST_F(RandomOverlapChoice, IsTheFirstWithinHalfAPercentOfTheQuickest) {
  std::set<OverlapWay> chosen;
  for (int i = 0; i < 12; ++i) {
    const PlanOptions options = options_of(static_cast<std::int32_t>(pick(2, 8)), pick(2, 12));
    const MachineProfile machine = machine_with(static_cast<double>(pick(1, 100)) / 20, 1 << pick(0, 2),
                                                static_cast<double>(pick(1, 100)) / 50);
    const OverlapRequest request = request_of(options, pick(1, 8));
    const OverlapChoice choice = choose_overlap(request, machine);
    const double signal_us = simulated_us(request.signal, options.world_size, machine);
    const double serial_us = simulated_us(request.serial, options.world_size, machine);
    const double slices_us = choose_parts(request.tail_free, machine).total_us;
    EXPECT_EQ(choice.signal_us, signal_us);
    EXPECT_EQ(choice.serial_us, serial_us);
    EXPECT_EQ(choice.parts.total_us, slices_us);
    const double enough_us = 1.005 * std::min({signal_us, serial_us, slices_us});
    const OverlapWay expected = slices_us <= enough_us   ? OverlapWay::kTailFree
                                : signal_us <= enough_us ? OverlapWay::kSignal
                                                         : OverlapWay::kSerial;
    EXPECT_EQ(choice.way, expected) << choice.reason;
    chosen.insert(choice.way);
  }
  EXPECT_GT(chosen.size(), 1U);
}

OpenCall open_call(const PlanOptions& options) {
  OpenCall call{
      .operation = "gemm-reduce-scatter",
      .variant = "contiguous",
      .collective = TransferKind::kReduceScatter,
      .options = options,
      .default_tile = {kTile, kTile, 1},
      .waves = [](const PlanOptions& o) { return num_waves_reduce_scatter(o, RowOwnership::kContiguous); },
      .build = [](const PlanOptions& o) { return plan_reduce_scatter(o, RowOwnership::kContiguous); }};
  call.options.tile_m = call.options.tile_n = call.options.swizzle = 0;
  return call;
}

TEST(OverlapChoice, ATunerDecidesByItsMachine) {
  const PlanOptions options = options_of(8, 16);
  std::vector<OverlapDecision> heard;
  CallTuner::Options tuner;
  tuner.on_overlap = [&](const OverlapDecision& decision) { heard.push_back(decision); };
  tuner.machine = machine_with(1, 0, 0);
  auto decision = CallTuner(tuner).choose_overlap(open_call(options), in_slices(options));
  ASSERT_TRUE(decision.has_value());
  EXPECT_EQ(decision->way, OverlapWay::kTailFree);

  tuner.machine = machine_with(10, 4, 0.02);
  decision = CallTuner(tuner).choose_overlap(open_call(options), in_slices(options));
  ASSERT_TRUE(decision.has_value());
  EXPECT_NE(decision->way, OverlapWay::kTailFree) << decision->reason;
  EXPECT_EQ(decision->groups.tile.tile_m, kTile);
  EXPECT_EQ(decision->groups.partition.size() == 1U, decision->way == OverlapWay::kSerial);
  ASSERT_EQ(heard.size(), 2U);
  EXPECT_EQ(heard[1].reason, decision->reason);
}

TEST(OverlapChoice, WithoutAMachineATunedEntryIsForGroups) {
  const PlanOptions options = options_of(4, 16);
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "overlap_choice_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  CallTuner::Options tuner;
  tuner.cache_path = (folder / "tuning.json").string();
  tuner.identity = {.device = "here", .driver = "", .libraries = {}};
  EXPECT_FALSE(CallTuner(tuner).choose_overlap(open_call(options), in_slices(options)).has_value());

  OpenCall call = open_call(options);
  TuningEntry entry;
  entry.key = CallTuner(tuner).key_of(call);
  entry.tile_m = entry.tile_n = kTile;
  entry.swizzle = 1;
  entry.partition = {40, 24};
  entry.how = "measured";
  entry.date = "2026-11-30";
  TuningCache(tuner.cache_path, tuner.identity, nullptr).store(entry);
  const auto decision = CallTuner(tuner).choose_overlap(call, in_slices(options));
  ASSERT_TRUE(decision.has_value());
  EXPECT_EQ(decision->way, OverlapWay::kSignal);
  EXPECT_EQ(decision->groups.partition, entry.partition);
  EXPECT_THAT(decision->reason, HasSubstr("not known without a machine profile"));
}

TEST(OverlapChoice, AnUnfitMachineIsWarnedOfAndBadCallsStayErrors) {
  std::string warning;
  CallTuner::Options tuner;
  tuner.machine = machine_with(1, 0, 0);
  tuner.warn = [&](const std::string& text) { warning = text; };
  PlanOptions options = options_of(2, 4);
  options.dtype = DType::kBFloat16;
  EXPECT_FALSE(CallTuner(tuner).choose_overlap(open_call(options), in_slices(options)).has_value());
  EXPECT_THAT(warning, HasSubstr("test: ways to overlap are not predicted: the machine profile has no bf16"));
  options.m = -1;
  FLASHOVERLAP_EXPECT_THROW(
      ErrorKind::kBadArgument, "m must be at least 0, got -1",
      static_cast<void>(CallTuner(tuner).choose_overlap(open_call(options), in_slices(options))));
}

}  // namespace
}  // namespace flashoverlap::test

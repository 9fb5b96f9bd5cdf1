#include "flashoverlap/tuner.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "flashoverlap/simulator.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap {
namespace {

using test::SeededTest;

constexpr auto kBadArgument = ErrorKind::kBadArgument;

TuneRequest request(TransferKind collective, std::int64_t ranks, std::int64_t m, std::int64_t n,
                    std::int64_t k) {
  TuneRequest result;
  result.collective = collective;
  result.world_size = ranks;
  result.m = m;
  result.n = n;
  result.k = k;
  result.dtype = DType::kFloat16;
  if (collective == TransferKind::kAllToAll) {
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      std::vector<std::int32_t> destinations;
      for (std::int64_t row = 0; row < m; ++row)
        destinations.push_back(static_cast<std::int32_t>(row % ranks));
      result.routing.destinations.push_back(std::move(destinations));
    }
  }
  return result;
}

class Tuner : public SeededTest {};

TEST_F(Tuner, TheChoiceIsNeverPredictedSlowerThanSerial) {
  for (const std::string& name : shipped_machine_profiles()) {
    const MachineProfile machine = load_machine_profile(name);
    const std::int64_t ranks = name.find("-2") != std::string::npos ? 2 : 4;
    for (const TransferKind collective :
         {TransferKind::kAllReduce, TransferKind::kReduceScatter, TransferKind::kAllToAll}) {
      TuneRequest call = request(collective, ranks, pick(1, 3000), pick(1, 3000), pick(1, 3000));
      call.dtype = DType::kBFloat16;
      const TuneResult result = tune_call(call, machine);
      EXPECT_LE(result.best.prediction.total_us, result.serial.prediction.total_us) << name;
      EXPECT_FALSE(result.serial.overlaps());
      EXPECT_TRUE(std::isfinite(result.best.prediction.total_us) && result.best.prediction.total_us > 0);
      for (std::size_t i = 1; i < result.candidates.size(); ++i) {
        EXPECT_LE(result.candidates[i - 1].prediction.total_us, result.candidates[i].prediction.total_us);
      }
      const std::vector<OverlapPlan> plans = plans_for(call, result.best);
      for (const OverlapPlan& plan : plans) EXPECT_EQ(verify(plan).reason, "") << name;
      if (collective != TransferKind::kAllToAll) {
        EXPECT_EQ(plans[0].partition(), result.best.partition);
      }
    }
  }
}

TEST_F(Tuner, SlicesOfGivenSizesHaveAPlanForEachRank) {
  const MachineProfile machine = load_machine_profile("4x-a100-nvlink");
  TuneRequest call = request(TransferKind::kReduceScatter, 4, 2000, 1024, 512);
  call.slice_sizes = {700, 0, 1000, 300};
  const TuneResult result = tune_call(call, machine);
  const std::vector<OverlapPlan> plans = plans_for(call, result.best);
  ASSERT_EQ(plans.size(), 4U);
  EXPECT_EQ(verify(plans).reason, "");
  for (std::size_t rank = 0; rank < plans.size(); ++rank)
    EXPECT_EQ(plans[rank].output_rows, call.slice_sizes[rank]);
}

/// A machine of `units` units that compute tiles of 256 x 192, `per_tile` together, and a curve of 16 of
/// them.
MachineProfile machine_of_clusters(std::int64_t units, std::int64_t per_tile) {
  MachineProfile machine;
  machine.units = units;
  machine.gemm.launch_us = 2;
  machine.gemm.kernels = {{DType::kFloat16, 256, 192, 2.5, 14000, RaggedTiles::kPadded, "test", per_tile}};
  machine.signal_us = 6;
  machine.curves = {{.collective = TransferKind::kAllReduce,
                     .world_size = 4,
                     .units = 16,
                     .dtype = {},
                     .curve = BandwidthCurve({{1 << 16, 20, 0}, {1 << 28, 1300, 0}}, "all-reduce"),
                     .source = "test"}};
  return machine;
}

/// The formula of docs/tuning.md, of whole tiles.
double gemm_us(const TuneRequest& call, std::int64_t clusters) {
  const std::int64_t tiles = (call.m + 255) / 256 * ((call.n + 191) / 192);
  const std::int64_t waves = (tiles + clusters - 1) / clusters;
  return 2 + static_cast<double>(waves) * (2.5 + 2.0 * 256 * 192 * static_cast<double>(call.k) / 14e6);
}

TEST_F(Tuner, SerialHasAllUnitsAndOverlapWhatCommunicationLeaves) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    const TuneRequest call =
        request(TransferKind::kAllReduce, 4, pick(1, 9000), pick(1, 9000), pick(64, 4000));
    const std::int64_t per_tile = pick(1, 4);
    const std::int64_t units = pick(17 * per_tile + 16, 140);
    const MachineProfile machine = machine_of_clusters(units, per_tile);
    const TuneResult result = tune_call(call, machine);
    EXPECT_EQ(result.serial.resources.compute_units, units / per_tile);
    EXPECT_EQ(result.serial.resources.communication_units, 16);
    const double serial_us =
        gemm_us(call, units / per_tile) + 6 + machine.curves[0].curve.time_us(call.m * call.n * 2);
    EXPECT_NEAR(result.serial.prediction.total_us, serial_us, 1e-6 * serial_us);
    for (const TuneChoice& candidate : result.candidates) {
      if (!candidate.overlaps()) continue;
      EXPECT_EQ(candidate.resources.compute_units, (units - 16) / per_tile);
      const double us = gemm_us(call, (units - 16) / per_tile);
      EXPECT_NEAR(candidate.prediction.compute_us, us, 1e-6 * us);
    }
  }
}

TEST_F(Tuner, ThePlansOfGpuExecutorsArePricedInClusters) {
  const MachineProfile machine = load_machine_profile("4x-h200-nvlink");
  // As cluster_bench measured it: clusters of two SMs on the 108 SMs beside 24.
  TuneRequest call = request(TransferKind::kAllReduce, 4, 4096, 8192, 2048);
  call.dtype = DType::kBFloat16;
  TuneChoice choice;
  choice.tile = {256, 192, 4};
  choice.resources = {54, 24};
  choice.partition = std::vector<std::int64_t>(13, 1);
  EXPECT_NEAR(overlap_cost(plans_for(call, choice), machine).finish_us.back(), 214.22, 1e-6);
  call.k = 3584;  // not measured: 13 waves of the kernel's model
  const double tile_us = 2.4794 + 2.0 * 256 * 192 * 3584 / 14009e3;
  EXPECT_NEAR(overlap_cost(plans_for(call, choice), machine).finish_us.back(), 2 + 13 * tile_us, 1e-6);
}

TEST_F(Tuner, TheSimulatorAgreesWithTheChoiceWhereNothingContends) {
  const MachineProfile machine = load_machine_profile("8x-a800-nvlink");
  for (const TransferKind collective : {TransferKind::kAllReduce, TransferKind::kReduceScatter}) {
    const TuneRequest call = request(collective, 4, 4096, 8192, 2048);
    const TuneResult result = tune_call(call, machine);
    const std::vector<OverlapPlan> plans = plans_for(call, result.best);
    EXPECT_NEAR(simulate_symmetric(plans[0], machine).total_us, result.best.prediction.total_us, 1e-6);
  }
}

TEST_F(Tuner, UnitsAreSearchedWithThePartition) {
  const MachineProfile machine = load_machine_profile("8x-h200-nvlink");
  const TuneResult large = tune_call(request(TransferKind::kAllReduce, 8, 8192, 8192, 1024), machine);
  EXPECT_TRUE(large.best.overlaps());
  EXPECT_EQ(large.best.resources.compute_units + large.best.resources.communication_units, 132);
  EXPECT_EQ(large.best.resources.communication_units, 16);  // communication bound: the wider curve
  EXPECT_EQ(large.serial.resources.compute_units, 132);
  const TuneResult small = tune_call(request(TransferKind::kAllReduce, 8, 64, 128, 64), machine);
  EXPECT_FALSE(small.best.overlaps());
  EXPECT_EQ(small.best.prediction.total_us, small.serial.prediction.total_us);
}

TEST_F(Tuner, TheSameRequestGivesTheSameResult) {
  const MachineProfile machine = load_machine_profile("1x-h200-rehearsal-2");
  const TuneRequest call = request(TransferKind::kAllReduce, 2, 4096, 8192, 4096);
  const TuneResult first = tune_call(call, machine);
  const TuneResult second = tune_call(call, machine);
  EXPECT_EQ(first.best.partition, second.best.partition);
  EXPECT_EQ(first.best.tile, second.best.tile);
  EXPECT_EQ(explain(first), explain(second));
}

TEST_F(Tuner, ExplainsItself) {
  const MachineProfile machine = load_machine_profile("8x-a800-nvlink");
  const std::string overlap =
      explain(tune_call(request(TransferKind::kAllReduce, 8, 8192, 8192, 2048), machine));
  EXPECT_NE(overlap.find("Chosen: overlap in"), std::string::npos) << overlap;
  EXPECT_NE(overlap.find("106 units compute and 2 communicate"), std::string::npos) << overlap;
  EXPECT_NE(overlap.find("us of communication are hidden"), std::string::npos) << overlap;
  const std::string serial = explain(tune_call(request(TransferKind::kAllReduce, 8, 64, 128, 64), machine));
  EXPECT_NE(serial.find("Chosen: no overlap"), std::string::npos) << serial;
  EXPECT_NE(serial.find("Nothing is gained by overlapping"), std::string::npos) << serial;
}

TEST_F(Tuner, NothingToDoIsFine) {
  const MachineProfile machine = load_machine_profile("8x-a800-nvlink");
  const TuneResult empty = tune_call(request(TransferKind::kAllReduce, 4, 0, 8192, 2048), machine);
  EXPECT_TRUE(empty.best.partition.empty());
  EXPECT_FALSE(explain(empty).empty());
  const TuneResult alone = tune_call(request(TransferKind::kAllReduce, 1, 512, 512, 64), machine);
  EXPECT_FALSE(alone.best.overlaps());
}

TEST_F(Tuner, MeasurementsDecideWhenAskedFor) {
  const MachineProfile machine = load_machine_profile("8x-a800-nvlink");
  TuneResult result = tune_call(request(TransferKind::kAllReduce, 4, 4096, 8192, 2048), machine);
  ASSERT_TRUE(result.best.overlaps());
  int calls = 0;
  TuneResult third = result;
  measure_best(third, 3, [&](const TuneChoice& choice) {
    ++calls;
    return choice.partition == result.candidates[2].partition ? 10.0 : 20.0;
  });
  EXPECT_EQ(calls, 4);
  EXPECT_EQ(third.best.partition, result.candidates[2].partition);
  EXPECT_EQ(third.measured_us, 10);
  EXPECT_EQ(third.serial_measured_us, 20);
  EXPECT_NE(explain(third).find("Measured 10.0 us against 20.0 us"), std::string::npos);
  TuneResult none = result;
  measure_best(none, 3, [&](const TuneChoice& choice) { return choice.overlaps() ? 30.0 : 20.0; });
  EXPECT_FALSE(none.best.overlaps());
  FLASHOVERLAP_EXPECT_THROW(
      kBadArgument, "a measured time is nan us",
      measure_best(result, 1, [](const TuneChoice&) { return std::numeric_limits<double>::quiet_NaN(); }));
}

TEST_F(Tuner, BadRequestsAreNamed) {
  const MachineProfile machine = load_machine_profile("8x-a800-nvlink");
  const auto run = [&](auto change) {
    TuneRequest call = request(TransferKind::kAllReduce, 4, 512, 512, 64);
    change(call);
    static_cast<void>(tune_call(call, machine));
  };
  FLASHOVERLAP_EXPECT_THROW(kBadArgument, "send cannot be tuned",
                            run([](auto& c) { c.collective = TransferKind::kSend; }));
  FLASHOVERLAP_EXPECT_THROW(kBadArgument, "world size is 0", run([](auto& c) { c.world_size = 0; }));
  FLASHOVERLAP_EXPECT_THROW(kBadArgument, "has at most 8 ranks, 9 were asked for",
                            run([](auto& c) { c.world_size = 9; }));
  FLASHOVERLAP_EXPECT_THROW(kBadArgument, "no f32 GEMM kernel",
                            run([](auto& c) { c.dtype = DType::kFloat32; }));
  FLASHOVERLAP_EXPECT_THROW(kBadArgument, "8 communication units must leave some of the 8 units",
                            run([](auto& c) { c.units = 8, c.communication_units = {8}; }));
  FLASHOVERLAP_EXPECT_THROW(kBadArgument, "units is -1", run([](auto& c) { c.units = -1; }));
  FLASHOVERLAP_EXPECT_THROW(kBadArgument, "m", run([](auto& c) { c.m = -5; }));
}

}  // namespace
}  // namespace flashoverlap

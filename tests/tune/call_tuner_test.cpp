#include "flashoverlap/call_tuner.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <numeric>

#include "flashoverlap/plan_builders.h"

namespace flashoverlap {
namespace {

MachineProfile machine() {
  MachineProfile profile;
  profile.name = "test";
  profile.units = 2;
  profile.gemm.kernels = {{DType::kFloat32, 32, 64, 100, 10, RaggedTiles::kPadded, "test"},
                          {DType::kFloat32, 64, 64, 200, 10, RaggedTiles::kPadded, "test"}};
  profile.curves.push_back({.collective = TransferKind::kAllReduce,
                            .world_size = 2,
                            .units = 0,
                            .dtype = {},
                            .curve = BandwidthCurve({{1000, 20, 0}, {1000000, 220, 0}}, "all-reduce"),
                            .source = "test"});
  return profile;
}

OpenCall call(std::int64_t m) {
  OpenCall open;
  open.operation = "gemm-all-reduce";
  open.options.world_size = 2;
  open.options.m = m;
  open.options.n = 256;
  open.options.k = 64;
  open.options.tile_m = open.options.tile_n = open.options.swizzle = 0;
  open.options.resources = {2, 0};
  open.default_tile = {128, 128, 1};
  open.waves = num_waves;
  open.build = plan_all_reduce;
  return open;
}

class CallTunerTest : public ::testing::Test {
 protected:
  CallTunerTest()
      : path_((std::filesystem::temp_directory_path() /
               ("flashoverlap_call_tuner_" + std::to_string(::getpid())))
                  .string()) {}
  ~CallTunerTest() override {
    for (const char* end : {"", ".lock", ".refused"}) std::filesystem::remove(path_ + end);
  }

  CallTuner tuner(bool with_machine, bool with_cache) {
    CallTuner::Options options;
    if (with_machine) options.machine = machine();
    if (with_cache) options.cache_path = path_;
    options.communicator = "test";
    options.warn = [this](const std::string& text) { warnings_.push_back(text); };
    return CallTuner(std::move(options));
  }

  void store(const OpenCall& open, std::vector<std::int64_t> partition, std::int64_t tile = 64) {
    TuningCache cache(path_, {}, nullptr);
    TuningEntry entry;
    entry.key = tuner(false, false).key_of(open);
    entry.tile_m = entry.tile_n = tile;
    entry.resources = {2, 0};
    entry.partition = std::move(partition);
    entry.how = "predicted";
    entry.date = "2026-11-29";
    cache.store(entry);
  }

  static std::int64_t sum(const std::vector<std::int64_t>& partition) {
    return std::accumulate(partition.begin(), partition.end(), std::int64_t{0});
  }

  std::string path_;
  std::vector<std::string> warnings_;
};

TEST_F(CallTunerTest, TheCacheComesFirst) {
  store(call(512), {1, 2, 5, 8});
  const TunedCall tuned = tuner(true, true).choose(call(512));
  EXPECT_EQ(tuned.origin, ChoiceOrigin::kCache);
  EXPECT_EQ(tuned.partition, (std::vector<std::int64_t>{1, 2, 5, 8}));
  EXPECT_EQ(tuned.tile, (TileShape{64, 64, 1}));
}

TEST_F(CallTunerTest, ThenThePrediction) {
  const TunedCall tuned = tuner(true, true).choose(call(512));
  EXPECT_EQ(tuned.origin, ChoiceOrigin::kPredicted);
  EXPECT_NE(tuned.explanation.find("Chosen: "), std::string::npos);
  PlanOptions options = call(512).options;
  options.tile_m = tuned.tile.tile_m;
  options.tile_n = tuned.tile.tile_n;
  options.swizzle = 1;
  EXPECT_EQ(sum(tuned.partition), num_waves(options));
}

TEST_F(CallTunerTest, ThenTheNearestShape) {
  store(call(512), {1, 2, 5, 8});
  const TunedCall tuned = tuner(false, true).choose(call(1000));
  EXPECT_EQ(tuned.origin, ChoiceOrigin::kNearest);
  EXPECT_EQ(tuned.partition, (std::vector<std::int64_t>{2, 4, 10, 16}));
  EXPECT_NE(tuned.explanation.find("nearest tuned shape, gemm-all-reduce m=512"), std::string::npos)
      << tuned.explanation;
}

TEST_F(CallTunerTest, ThenTheDefault) {
  const TunedCall tuned = tuner(false, true).choose(call(512));
  EXPECT_EQ(tuned.origin, ChoiceOrigin::kDefault);
  EXPECT_EQ(tuned.tile, (TileShape{128, 128, 1}));
  EXPECT_EQ(tuned.partition, default_partition(4));
  EXPECT_NE(tuned.explanation.find("nothing is known of this machine"), std::string::npos);
}

TEST_F(CallTunerTest, EntriesThatDoNotFitTheCallAreNotUsed) {
  store(call(512), {1, 2, 5, 7});  // one wave too few
  EXPECT_EQ(tuner(true, true).choose(call(512)).origin, ChoiceOrigin::kPredicted);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("its partition sums to 15 waves, the call has 16"), std::string::npos)
      << warnings_[0];
  store(call(512), {1, 2, 5, 8});
  OpenCall given = call(512);
  given.options.tile_m = given.options.tile_n = 32;
  const TunedCall tuned = tuner(true, true).choose(given);  // tuned for another tile than the caller wants
  EXPECT_EQ(tuned.origin, ChoiceOrigin::kPredicted);
  EXPECT_EQ(tuned.tile.tile_m, 32);
}

TEST_F(CallTunerTest, AMachineThatLacksTheTypeIsNoError) {
  OpenCall open = call(512);
  open.options.dtype = DType::kFloat16;
  open.options.tile_m = open.options.tile_n = 64;
  EXPECT_EQ(tuner(true, false).choose(open).origin, ChoiceOrigin::kDefault);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("no f16 GEMM kernel"), std::string::npos) << warnings_[0];
}

// Where the tile is open too, there is no candidate at all (found by fuzzing: it crashed).
TEST_F(CallTunerTest, AMachineThatLacksTheTypeIsNoErrorWithAnOpenTile) {
  OpenCall open = call(512);
  open.options.dtype = DType::kFloat16;
  EXPECT_EQ(tuner(true, false).choose(open).origin, ChoiceOrigin::kDefault);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("the machine profile has no f16 GEMM kernel"), std::string::npos)
      << warnings_[0];
}

TEST(Paced, IsTheSlowerOfCopyAndLink) {
  const MachineProfile slow = paced(machine(), {.bandwidth_gbps = 0.5, .latency_us = 30});
  const BandwidthCurve curve = slow.curve(TransferKind::kAllReduce, 2, 0, DType::kFloat32);
  EXPECT_NEAR(curve.time_us(1000000), 20 + 30 + 1000000 / 500.0, 1e-6);
  const MachineProfile fast = paced(machine(), {.bandwidth_gbps = 1000, .latency_us = 0});
  EXPECT_NEAR(fast.curve(TransferKind::kAllReduce, 2, 0, DType::kFloat32).time_us(1000000), 220, 1e-9);
  EXPECT_EQ(paced(machine(), {}), machine());
  // Other world sizes have no measured curve: the link's own formula.
  EXPECT_NEAR(slow.curve(TransferKind::kReduceScatter, 4, 0, DType::kFloat32).time_us(1000000),
              30 + 750000 / 500.0, 1e-6);
}

/// Two units compute a tile together.
MachineProfile machine_of_clusters(std::int64_t communicating = 4) {
  MachineProfile profile = machine();
  profile.units = 6 + communicating;
  for (GemmKernel& kernel : profile.gemm.kernels) kernel.units_per_tile = 2;
  profile.curves[0].units = communicating;
  return profile;
}

/// As operators ask for an executor of a GPU with clusters of two.
OpenCall device_call(std::int64_t m, std::int64_t communicating = 4) {
  OpenCall open = call(m);
  open.options.resources = {3, communicating};
  open.default_tile = {64, 64, 2};
  open.tiles_of_executor = true;
  open.min_group_bytes = 16 << 10;
  return open;
}

TEST_F(CallTunerTest, DeviceCallsArePredictedWithAllUnitsOfTheirPlans) {
  CallTuner::Options options;
  const auto choose = [&](std::int64_t communicating) {
    options.machine = machine_of_clusters(communicating);
    const OpenCall open = device_call(4096, communicating);
    const TunedCall tuned = CallTuner(options).choose(open);
    EXPECT_EQ(tuned.origin, ChoiceOrigin::kPredicted);
    EXPECT_EQ(tuned.tile.swizzle, 2);
    OpenCall sized = open;
    sized.options.tile_m = tuned.tile.tile_m;
    sized.options.tile_n = tuned.tile.tile_n;
    sized.options.swizzle = 1;
    EXPECT_EQ(sum(tuned.partition), num_waves(sized.options));
    return tuned.partition.size();
  };
  // One unit for communication is the one that clusters of two leave: overlapping costs nothing. Four are two
  // more clusters when nothing is overlapped, and a call that mostly computes loses more by them than it
  // could hide. The one group then has the waves of the call's three compute units.
  EXPECT_GT(choose(1), 1U);
  EXPECT_EQ(choose(4), 1U);
}

TEST_F(CallTunerTest, AProfileWithoutTheExecutorsTileIsNotBelieved) {
  CallTuner::Options options;
  options.machine = machine_of_clusters();
  options.warn = [this](const std::string& text) { warnings_.push_back(text); };
  OpenCall open = device_call(4096);
  open.default_tile = {64, 128, 1};
  const TunedCall tuned = CallTuner(options).choose(open);
  EXPECT_EQ(tuned.origin, ChoiceOrigin::kDefault);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("machine profile test has no f32 kernel of 64x128, the executor's tile"),
            std::string::npos)
      << warnings_[0];
  // 64 x 2 tiles on 3 units: 43 waves, 4 MiB in all; one wave has more than 16 KiB.
  EXPECT_EQ(tuned.partition, default_partition(43));
  open.min_group_bytes = 1 << 20;
  EXPECT_EQ(CallTuner(options).choose(open).partition, (std::vector<std::int64_t>{16, 16, 11}));
}

TEST_F(CallTunerTest, DeviceEntriesHoldForTheirComputeUnitsAndSerialOnesForAny) {
  CallTuner::Options options;
  options.cache_path = path_;
  options.communicator = "nccl";
  options.units = 10;
  options.warn = [this](const std::string& text) { warnings_.push_back(text); };
  const OpenCall open = device_call(512);
  TuningEntry entry;
  entry.key = CallTuner(options).key_of(open);
  EXPECT_EQ(entry.key.units, 10);
  entry.tile_m = entry.tile_n = 64;
  entry.resources = {3, 4};
  entry.partition = {5, 6};  // 32 tiles on 3 compute units
  entry.predicted_us = entry.serial_us = 1;
  entry.how = "predicted";
  entry.date = "2026-11-30";
  const auto stored = [&] {
    TuningCache(path_, options.identity, nullptr).store(entry);
    return CallTuner(options).choose(open);
  };
  EXPECT_EQ(stored().origin, ChoiceOrigin::kCache);
  EXPECT_EQ(stored().partition, entry.partition);
  entry.resources = {4, 2};
  entry.partition = {3, 5};
  EXPECT_NE(stored().origin, ChoiceOrigin::kCache);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("it is for 4 compute units beside 2 for communication, the call has 3"),
            std::string::npos)
      << warnings_[0];
  entry.resources = {5, 4};  // no overlap, on all units
  entry.partition = {7};
  EXPECT_EQ(stored().origin, ChoiceOrigin::kCache);
  EXPECT_EQ(stored().partition, (std::vector<std::int64_t>{11}));
}

}  // namespace
}  // namespace flashoverlap

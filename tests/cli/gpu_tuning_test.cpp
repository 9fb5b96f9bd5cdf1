#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "flashoverlap/plan_builders.h"
#include "tuning_options.h"

// How a GPU's profile and tuning results are found again; no GPU is needed for that.
namespace flashoverlap::cli {
namespace {

class GpuTuning : public ::testing::Test {
 protected:
  GpuTuning()
      : folder_(std::filesystem::temp_directory_path() /
                ("flashoverlap_gpus_" + std::to_string(::getpid()))) {
    ::setenv("FLASHOVERLAP_CACHE", (folder_ / "tuning.json").c_str(), 1);
    std::filesystem::create_directories(folder_);
    problem_.m = 8192;
    problem_.n = 8192;
    problem_.k = 2048;
    problem_.ranks = 4;
    problem_.dtype = DType::kBFloat16;
    gpu_.backend = "cuda";
  }
  ~GpuTuning() override {
    ::unsetenv("FLASHOVERLAP_CACHE");
    std::filesystem::remove_all(folder_);
  }

  static GpuMachine machine() {
    const MachineProfile h200 = load_machine_profile("4x-h200-nvlink");
    return {.identity = {.device = h200.provenance.device,
                         .driver = h200.provenance.driver,
                         .libraries = h200.provenance.libraries},
            .units = 132,
            .shares_devices = false,
            .max_ctas = 24};
  }
  /// As `profile --backend cuda` leaves it.
  void keep_profile() const {
    std::ofstream(default_gpu_profile_path(problem_.ranks, gpu_, machine()))
        << to_json(load_machine_profile("4x-h200-nvlink"));
  }
  /// As `tune --backend cuda` leaves it: 16 SMs communicate.
  void keep_entry(std::vector<std::int64_t> partition) const {
    TuningEntry entry;
    entry.key = tuning_key(problem_, machine().units, "nccl");
    entry.tile_m = 256;
    entry.tile_n = 128;
    entry.swizzle = 5;
    entry.resources = {58, 16};
    entry.partition = std::move(partition);
    entry.predicted_us = entry.serial_us = entry.measured_us = 1;
    entry.how = "measured";
    entry.date = "2026-11-30";
    TuningCache(TuningCache::default_path(), machine().identity, nullptr).store(entry);
  }
  /// As the operator asks on an executor that leaves `sms` to communication.
  [[nodiscard]] OpenCall call(int sms) const {
    OpenCall open;
    open.operation = "gemm-all-reduce";
    open.options.world_size = 4;
    open.options.dtype = DType::kBFloat16;
    open.options.m = open.options.n = 8192;
    open.options.k = 2048;
    open.options.tile_m = open.options.tile_n = open.options.swizzle = 0;
    open.options.resources = {(132 - sms) / 2, sms};
    open.default_tile = {256, 192, 5};
    open.waves = num_waves;
    open.build = plan_all_reduce;
    open.tiles_of_executor = true;
    return open;
  }

  std::filesystem::path folder_;
  ProblemOptions problem_;
  GpuOptions gpu_;
  TuningOptions options_;
};

TEST(GpuOptions, SmsOfCommunicationFollowWhatExchanges) {
  GpuOptions options;
  EXPECT_EQ(options.sms(false), 24) << "NCCL";
  options.communicator = "local";
  EXPECT_EQ(options.sms(false), 16);
  options.communicator = "copy-engine";
  EXPECT_EQ(options.sms(false), 0) << "copies take none";
  EXPECT_EQ(options.sms(true), 24) << "ranks that share a device have parts of it";
  options.communication_sms = {8, 2};
  EXPECT_EQ(options.sms(false), 8);
  EXPECT_EQ(options.sms(true), 8);
}

TEST_F(GpuTuning, TheProfileOfThisMachineIsFound) {
  EXPECT_FALSE(find_gpu_machine(options_, 4, gpu_, machine()));
  keep_profile();
  EXPECT_EQ(find_gpu_machine(options_, 4, gpu_, machine()).value().units, 132);
  EXPECT_FALSE(find_gpu_machine(options_, 2, gpu_, machine())) << "of another number of ranks";
  GpuOptions local = gpu_;
  local.communicator = "local";
  EXPECT_FALSE(find_gpu_machine(options_, 4, local, machine())) << "of another communicator";
  GpuMachine shared = machine();
  shared.shares_devices = true;
  EXPECT_FALSE(find_gpu_machine(options_, 4, gpu_, shared)) << "of ranks with a GPU each";
  GpuMachine updated = machine();
  updated.identity.driver = "999.1";
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(find_gpu_machine(options_, 4, gpu_, updated));
  const std::string warning = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find("is of 'NVIDIA H200' (580.159.04), this is 'NVIDIA H200' (999.1): not used"),
            std::string::npos)
      << warning;
}

TEST_F(GpuTuning, RunTakesWhatWasTuned) {
  const std::vector<std::int64_t> tuned{10, 20, 6};  // 32 x 64 tiles on 58 clusters
  keep_profile();
  keep_entry(tuned);
  std::vector<TunedCall> heard;
  const auto tuner = make_gpu_tuner(options_, problem_, {}, machine(), gpu_,
                                    [&](const TunedCall& choice) { heard.push_back(choice); });
  EXPECT_EQ(gpu_.communication_sms, std::vector<std::int64_t>{16});
  const TunedCall choice = tuner->choose(call(gpu_.sms(false)));
  EXPECT_EQ(choice.origin, ChoiceOrigin::kCache) << choice.explanation;
  EXPECT_EQ(choice.partition, tuned);
  EXPECT_EQ(choice.tile, (TileShape{256, 128, 5}));
  EXPECT_EQ(heard.size(), 1U);
}

TEST_F(GpuTuning, GivenSmsStayAndTheProfileDecides) {
  keep_profile();
  keep_entry({10, 20, 6});
  gpu_.communication_sms = {24};
  ::testing::internal::CaptureStderr();
  const auto tuner = make_gpu_tuner(options_, problem_, {}, machine(), gpu_, nullptr);
  EXPECT_EQ(gpu_.communication_sms, std::vector<std::int64_t>{24});
  const TunedCall choice = tuner->choose(call(24));
  EXPECT_EQ(choice.origin, ChoiceOrigin::kPredicted) << choice.explanation;
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("it is for 58 compute units beside 16"),
            std::string::npos);
}

TEST_F(GpuTuning, NoOverlapIsTunedToo) {
  keep_entry({36});
  const auto tuner = make_gpu_tuner(options_, problem_, {}, machine(), gpu_, nullptr);
  EXPECT_TRUE(gpu_.communication_sms.empty());
  const TunedCall choice = tuner->choose(call(gpu_.sms(false)));
  EXPECT_EQ(choice.origin, ChoiceOrigin::kCache);
  EXPECT_EQ(choice.partition, std::vector<std::int64_t>{38});  // 2048 tiles on the 54 clusters beside 24 SMs
}

}  // namespace
}  // namespace flashoverlap::cli

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "process.h"

// profile, tune, simulate, and run --partition auto, as a user runs them.
namespace flashoverlap {
namespace {

using Json = nlohmann::json;
using test::ProcessOptions;
using test::ProcessResult;
using test::run_command;
using test::words_of;

class TuningCommands : public ::testing::Test {
 protected:
  TuningCommands()
      : folder_(std::filesystem::temp_directory_path() /
                ("flashoverlap_tuning_" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~TuningCommands() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string file(const std::string& name) const { return (folder_ / name).string(); }

  /// With a cache folder of this test's own.
  ProcessResult run(const std::string& line) {
    ProcessOptions options;
    options.environment = {{"FLASHOVERLAP_CACHE", ""}, {"XDG_CACHE_HOME", folder_.string()}};
    return run_command(words_of(line), options);
  }

  Json run_json(const std::string& line) {
    const ProcessResult result = run(line + " --json");
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.exit_code == 0 ? Json::parse(result.out) : Json();
  }

  void expect_refused(const std::string& line, const std::string& part) {
    const ProcessResult result = run(line);
    EXPECT_EQ(result.exit_code, 2) << line;
    EXPECT_EQ(result.out, "") << line;
    EXPECT_NE(result.err.find(part), std::string::npos) << line << ": " << result.err;
  }

  std::string read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  std::filesystem::path folder_;
};

constexpr const char* kShape = " -m 256 -n 256 -k 64 --ranks 2 --threads 1";
constexpr const char* kUnpaced = " --link-gbps 0";
constexpr const char* kLink = " --link-gbps 1 --link-latency-us 20";

TEST_F(TuningCommands, ProfileTuneAndRunWorkTogether) {
  const ProcessResult profile = run("profile --ranks 2 --threads 1 --repetitions 1");
  ASSERT_EQ(profile.exit_code, 0) << profile.err;
  const std::string path = file("flashoverlap/machine-2x1.json");
  EXPECT_NE(profile.out.find("Written to " + path), std::string::npos) << profile.out;
  EXPECT_NE(profile.err.find("100% done"), std::string::npos) << profile.err;
  const Json machine = Json::parse(read(path));
  EXPECT_EQ(machine["provenance"]["kind"], "measured");
  EXPECT_EQ(machine["curves"].size(), 3U);

  const Json predicted = run_json(std::string("run gemm-all-reduce --iterations 1") + kShape + kLink);
  EXPECT_EQ(predicted["partition_origin"], "predicted");
  EXPECT_TRUE(predicted["correct"]);

  const Json tuned = run_json(std::string("tune gemm-all-reduce") + kShape + kLink);
  EXPECT_LE(tuned["chosen"]["predicted_us"], tuned["serial"]["predicted_us"]);
  EXPECT_EQ(tuned["cache"], file("flashoverlap/tuning.json"));

  const Json cached = run_json(std::string("run gemm-all-reduce --iterations 1") + kShape + kLink);
  EXPECT_EQ(cached["partition_origin"], "cache");
  EXPECT_EQ(cached["partition"], tuned["chosen"]["partition"]);
  EXPECT_EQ(cached["tile_m"], tuned["chosen"]["tile_m"]);
  EXPECT_TRUE(cached["correct"]);
  const Json given =
      run_json(std::string("run gemm-all-reduce --iterations 1 --tile-m 128 --tile-n 128 --partition 1,3") +
               kShape + kLink);
  EXPECT_EQ(given["partition_origin"], "given");
  const Json without =
      run_json(std::string("run gemm-all-reduce --iterations 1 --no-cache") + kShape + kLink);
  EXPECT_EQ(without["partition_origin"], "predicted");
}

TEST_F(TuningCommands, AForeignOrDamagedCacheIsRefusedAndNeverUsed) {
  const std::string cache = file("c.json");
  ASSERT_EQ(run("profile --ranks 2 --threads 1 --repetitions 1").exit_code, 0);
  const std::string tune = std::string("tune gemm-all-reduce --cache ") + cache + kShape + kUnpaced;
  ASSERT_EQ(run(tune).exit_code, 0);
  const std::string sound = read(cache);
  // Without it, and without a paced link, nothing is predicted: what is not in the cache shows.
  const std::string profile = file("flashoverlap/machine-2x1.json");
  std::filesystem::rename(profile, profile + ".away");
  const std::string use =
      std::string("run gemm-all-reduce --iterations 1 --cache ") + cache + kShape + kUnpaced;
  EXPECT_EQ(run_json(use)["partition_origin"], "cache");

  Json foreign = Json::parse(sound);
  foreign["entries"][0]["device"] = "another GPU";
  std::ofstream(cache) << foreign.dump();
  ProcessResult result = run(use + " --json");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.err.find("ignored"), std::string::npos) << result.err;
  EXPECT_EQ(Json::parse(result.out)["partition_origin"], "default");

  std::ofstream(cache) << sound.substr(0, sound.size() / 2);
  result = run(use + " --json");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.err.find("tuning cache refused, calls will be tuned again"), std::string::npos)
      << result.err;
  EXPECT_EQ(Json::parse(result.out)["partition_origin"], "default");
  EXPECT_TRUE(Json::parse(result.out)["correct"]);
  std::filesystem::rename(profile + ".away", profile);
  ASSERT_EQ(run(tune).exit_code, 0);
  EXPECT_EQ(run_json(use)["partition_origin"], "cache");
}

TEST_F(TuningCommands, TuneExplainsAndMeasures) {
  const ProcessResult other =
      run("tune gemm-all-reduce -m 8192 -n 8192 -k 2048 --dtype f16 --ranks 8 --machine 8x-a800-nvlink");
  EXPECT_EQ(other.exit_code, 0) << other.err;
  EXPECT_NE(other.out.find("Chosen: overlap in"), std::string::npos) << other.out;
  EXPECT_NE(other.out.find("Not kept in a cache."), std::string::npos) << other.out;
  EXPECT_FALSE(std::filesystem::exists(file("flashoverlap/tuning.json")));

  ASSERT_EQ(run("profile --ranks 2 --threads 1 --repetitions 1").exit_code, 0);
  const Json measured =
      run_json(std::string("tune gemm-reduce-scatter --measure 2 --iterations 1") + kShape + kLink);
  EXPECT_GT(measured["measured_us"], 0.0);
  EXPECT_LE(measured["measured_us"], measured["serial_measured_us"]);
}

TEST_F(TuningCommands, SimulatePrintsWhatItSimulated) {
  const std::string call =
      "simulate gemm-all-reduce -m 4096 -n 8192 -k 4096 --dtype f16 --ranks 4 --machine 8x-a800-nvlink";
  const ProcessResult text = run(call);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* part :
       {"8x-a800-nvlink (published), simulated", "speed-up", "waits for rank", "compute 0"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part << " in " << text.out;
  }
  const Json json = run_json(call);
  EXPECT_TRUE(json["simulated"]);
  EXPECT_NEAR(json["overlap_us"].get<double>(), json["predicted_us"].get<double>(), 1e-6);
  EXPECT_EQ(json["rank_times"].size(), 4U);
  EXPECT_EQ(run(call + " --jitter 0.1 --seed 3 --json").out, run(call + " --jitter 0.1 --seed 3 --json").out);
  EXPECT_GT(run_json(call + " --slow 2:2")["overlap_us"], json["overlap_us"]);

  const std::string trace = file("trace.json");
  ASSERT_EQ(run(call + " --trace " + trace).exit_code, 0);
  EXPECT_TRUE(Json::accept(read(trace)));
}

TEST_F(TuningCommands, SweepsWriteTables) {
  const std::string csv = file("sweep.csv");
  const ProcessResult text = run(
      "simulate gemm-all-reduce -m 2048 -n 2048 -k 1024 --dtype bf16 --machine 2x8-h100-infiniband --sweep "
      "ranks=2,8,16 --csv " +
      csv);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  std::istringstream lines(read(csv));
  std::string line;
  int count = 0;
  while (std::getline(lines, line)) ++count;
  EXPECT_EQ(count, 4);
  const Json json = run_json(
      "simulate gemm-reduce-scatter -m 2048 -n 2048 -k 1024 --dtype bf16 --ranks 8 --machine 8x-h200-nvlink "
      "--sweep k=512,1024");
  ASSERT_EQ(json["rows"].size(), 2U);
  EXPECT_EQ(json["rows"][1]["k"], 1024);
}

TEST_F(TuningCommands, RefusalsNameTheirOption) {
  expect_refused("simulate gemm-all-reduce", "--machine");
  expect_refused("simulate gemm-all-reduce --machine nowhere",
                 "machine 'nowhere' is not known; shipped profiles:");
  expect_refused("simulate gemm-all-reduce --machine " + file("none.json"), "cannot be read");
  expect_refused("simulate --machine 8x-a800-nvlink --dtype f16 --sweep q=1", "--sweep");
  expect_refused("simulate --machine 8x-a800-nvlink --dtype f16 --sweep m=", "--sweep");
  expect_refused("simulate --machine 8x-a800-nvlink --dtype f16 --slow 9", "RANK:FACTOR");
  expect_refused("simulate --machine 8x-a800-nvlink --dtype f16 --slow 9:2",
                 "slow rank 9 is not one of the 2 ranks");
  expect_refused("simulate --machine 8x-a800-nvlink --dtype f16 --jitter 2", "--jitter");
  expect_refused("simulate --machine 8x-a800-nvlink --dtype f32", "no f32 GEMM kernel");
  expect_refused("tune --machine 8x-a800-nvlink --dtype f16 --measure 2", "--measure");
  expect_refused("tune --cache a --no-cache", "no-cache");
  expect_refused("profile --dtypes f64", "--dtypes");
  expect_refused("profile --ranks 1 -o /nowhere/at/all.json", "--output");
  std::ofstream(file("bad.json")) << "{\"schema\": \"flashoverlap.machine-profile/9\"}";
  expect_refused("tune --machine " + file("bad.json"),
                 "this version reads \"flashoverlap.machine-profile/1\"");
  std::ofstream(file("empty.json")) << "";
  expect_refused("run -m 64 -n 64 -k 8 --machine " + file("empty.json"), "the file is empty");
}

}  // namespace
}  // namespace flashoverlap

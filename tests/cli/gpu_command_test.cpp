#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "process.h"

// What the command says of GPUs where there is none: doctor with a driver that is made up, the others their
// one line.
namespace flashoverlap {
namespace {

using Json = nlohmann::json;
using test::ProcessOptions;
using test::ProcessResult;
using test::run_command;
using test::words_of;

ProcessResult doctor(const std::string& line, const std::string& fake) {
  return run_command(words_of(line),
                     {.environment = {{"LD_LIBRARY_PATH", FLASHOVERLAP_FAKE_DRIVER}, {"FAKE_DRIVER", fake}}});
}

TEST(GpuCommand, DoctorSaysWhatGpusThereAre) {
  const std::string text = doctor("doctor", "").out;
  EXPECT_NE(text.find("3 x Made-up GPU A, driver "), std::string::npos) << text;
  EXPECT_NE(text.find("for CUDA 13.2"), std::string::npos) << text;
  EXPECT_NE(
      text.find("Made-up GPU B, compute capability 9.0, 132 SMs, 96.0 GiB, addresses the memory of 0\n"),
      std::string::npos)
      << text;
  EXPECT_NE(
      text.find(
          "Made-up GPU C, compute capability 9.0, 132 SMs, 96.0 GiB, addresses no other GPU's memory\n"),
      std::string::npos)
      << text;
  const Json json = Json::parse(doctor("doctor --json", "").out);
  ASSERT_EQ(json.at("gpus").size(), 3U);
  EXPECT_EQ(json["gpus"][0]["peers"], Json::array({1}));
  EXPECT_EQ(json["gpus"][2]["peers"], Json::array());
  EXPECT_EQ(json["gpus"][2]["name"], "Made-up GPU C");
  EXPECT_EQ(json["gpus"][1]["sms"], 132);
  EXPECT_TRUE(json["components"]["CUDA"]["found"].get<bool>());
}

TEST(GpuCommand, DoctorSaysWhyThereIsNone) {
  const Json none = Json::parse(doctor("doctor --json", "none").out);
  EXPECT_EQ(none["components"]["CUDA"]["reason"], "no CUDA device");
  EXPECT_TRUE(none["gpus"].empty());
  const Json broken = Json::parse(doctor("doctor --json", "init").out);
  EXPECT_EQ(broken["components"]["CUDA"]["reason"], "cuInit failed with error 100");
  EXPECT_FALSE(broken["components"]["CUDA"]["usable"].get<bool>());
}

ProcessResult run(const std::string& line) {
  const std::string folder = std::filesystem::temp_directory_path() / "flashoverlap_no_gpu";
  return run_command(words_of(line), {.environment = {{"CUDA_VISIBLE_DEVICES", ""},
                                                      {"FLASHOVERLAP_CACHE", ""},
                                                      {"XDG_CACHE_HOME", folder}}});
}

TEST(GpuCommand, WithoutADeviceThereIsOneLineThatSaysSo) {
  for (const std::string line :
       {"run gemm-all-reduce --backend cuda --dtype bf16",
        "run gemm-reduce-scatter --backend cuda --dtype bf16",
        "run gemm-reduce-scatter --method tail-free --backend cuda --dtype bf16",
        "run all-gather-gemm --backend cuda --dtype bf16 --ranks 4 --devices 0,0,0,0",
        "run gemm-all-to-all-heads --backend cuda --dtype f16 --comm local",
        "run mlp-tpsp --backend cuda --dtype bf16 --devices 0,0 --sms-communication 24",
        "run linear-dp --backend cuda --dtype f16 --comm local",
        "run attention-tpsp --backend cuda --dtype bf16 --comm copy-engine --ranks 4",
        "run attention-up --backend cuda --dtype bf16 --json", "profile --backend cuda",
        "run all-gather-gemm --backend cuda --dtype bf16 --decomposed",
        "run mlp-tpsp --backend cuda --dtype bf16 --decomposed",
        "profile --backend cuda --ranks 4 --devices 0,1,2,3 --comm local",
        "run gemm-all-reduce --backend cuda --dtype bf16 --nccl-buffers symmetric",
        "run moe-layer --backend cuda --dtype bf16 --nccl-buffers registered",
        "tune gemm-all-reduce --backend cuda --dtype bf16",
        "tune gemm-all-to-all --backend cuda --dtype f16 --comm copy-engine --measure 2"}) {
    const ProcessResult result = run(line);
    EXPECT_NE(result.exit_code, 0) << line;
    EXPECT_EQ(result.out, "") << line;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    const bool says_so =
        result.err.find("--backend cuda: this machine has no CUDA device") != std::string::npos ||
        result.err.find("--backend cuda: this build has no GPU executor") != std::string::npos;
    EXPECT_TRUE(says_so) << line << ": " << result.err;
  }
}

TEST(GpuCommand, OptionsOfGpusNeedThem) {
  for (const std::string line : {"run gemm-all-reduce", "run all-gather-gemm", "run mlp-tpsp",
                                 "run attention-up", "profile", "tune gemm-all-reduce"}) {
    for (const auto& [option, value] : {std::pair{"--devices", "0,1"},
                                        {"--sms-communication", "8"},
                                        {"--comm", "local"},
                                        {"--nccl-buffers", "symmetric"}}) {
      const ProcessResult result = run(line + " " + option + " " + value);
      EXPECT_EQ(result.exit_code, 2) << line;
      EXPECT_NE(result.err.find(std::string(option) + ": is for GPUs; add --backend cuda"), std::string::npos)
          << line << ": " << result.err;
    }
  }
  for (const std::string line : {"run gemm-reduce-scatter", "run all-gather-gemm", "run attention-tpsp"}) {
    EXPECT_NE(run(line + " --decomposed").err.find("--decomposed: is for GPUs; add --backend cuda"),
              std::string::npos)
        << line;
  }
  EXPECT_NE(run("run gemm-all-reduce --backend cuda --comm local --nccl-buffers symmetric")
                .err.find("--nccl-buffers: is for NCCL; add --comm nccl"),
            std::string::npos);
  EXPECT_NE(run("profile --backend cuda --nccl-buffers symmetric").err.find("curves are of plain buffers"),
            std::string::npos);
  EXPECT_NE(run("tune gemm-all-reduce --backend cuda --nccl-buffers fast").err.find("fast"),
            std::string::npos);
  EXPECT_NE(run("run all-gather-gemm --backend cuda --dtype bf16 --machine some.json")
                .err.find("slices on GPUs are not chosen by simulation yet"),
            std::string::npos);
  EXPECT_NE(run("tune gemm-all-reduce --backend cuda --link-gbps 5").err.find("NCCL cannot be paced"),
            std::string::npos);
  EXPECT_NE(run("run gemm-all-reduce --sms-communication 8,16 --backend cuda").err.find("'8,16'"),
            std::string::npos);
}

TEST(GpuCommand, GpusComputeNoFloat32) {
  for (const std::string line :
       {"run all-gather-gemm", "run mlp-tpsp", "run linear-dp", "run attention-tpsp", "run attention-up"}) {
    const ProcessResult result = run(line + " --backend cuda");
    EXPECT_EQ(result.exit_code, 2) << line;
    EXPECT_EQ(result.out, "") << line;
    const bool says_so =
        result.err == "flashoverlap: --backend cuda computes bf16 and f16, not f32; add --dtype bf16\n" ||
        result.err.find("--backend cuda: this build has no GPU executor") != std::string::npos;
    EXPECT_TRUE(says_so) << line << ": " << result.err;
  }
}

TEST(GpuCommand, TuneForAnotherMachinesGpusNeedsNone) {
  const std::string line =
      "tune gemm-all-reduce -m 8192 -n 8192 -k 2048 --dtype bf16 --ranks 4 --backend cuda --machine "
      "4x-h200-nvlink --json";
  const Json all = Json::parse(run(line).out);
  EXPECT_EQ(all["serial"]["compute_units"], 66);  // clusters of two on all 132 SMs
  EXPECT_EQ(all["cache"], "");
  bool has_other = false;
  for (const Json& candidate : all["candidates"]) {
    const int sms = candidate["communication_units"];
    has_other = has_other || sms == 24;
    if (candidate["partition"].size() > 1) {
      EXPECT_EQ(candidate["compute_units"], (132 - sms) / 2);
    }
  }
  EXPECT_TRUE(has_other);
  const Json some = Json::parse(run(line + " --sms-communication 8,16").out);
  for (const Json& candidate : some.at("candidates"))
    EXPECT_TRUE(candidate["communication_units"] == 8 || candidate["communication_units"] == 16);
}

}  // namespace
}  // namespace flashoverlap

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "process.h"

// `flashoverlap run|plan|simulate moe-layer`, as a user runs them.
namespace flashoverlap {
namespace {

using Json = nlohmann::json;
using test::run_command;
using test::words_of;

constexpr const char* kSmall =
    " --tokens 40 --hidden 24 --intermediate 16 --experts 8 --tile-m 8 --tile-n 16";

Json json_of(const std::string& line) {
  const auto result = run_command(words_of(line + " --json"), {});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return Json::parse(result.out);
}

void expect_refused(const std::string& line, const std::string& message) {
  const auto result = run_command(words_of(line), {});
  EXPECT_EQ(result.exit_code, 2) << line;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.substr(0, 14 + message.size()), "flashoverlap: " + message);
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
}

TEST(MoeCommand, RunsAndChecksEveryRoutingAndTransport) {
  for (const char* routing : {"balanced", "moderate", "stress"}) {
    for (const char* how :
         {"--transport put", "--transport collective", "--padding paper", "--padding shared"}) {
      const Json run =
          json_of(std::string("run moe-layer --ranks 3 --iterations 2 --link-gbps 0 --routing ") + routing +
                  " " + how + kSmall);
      EXPECT_EQ(run.at("correct"), true) << run;
      EXPECT_EQ(run.at("dropped_rows"), 0);
      EXPECT_GE(run.at("paper_wasted_rows"), run.at("wasted_rows"));
      for (const char* ratio : {"dispatch_overlap_ratio", "combine_overlap_ratio"}) {
        EXPECT_GE(run.at(ratio), 0);
        EXPECT_LE(run.at(ratio), 1);
      }
    }
  }
}

TEST(MoeCommand, PacesAdaptsAndDrops) {
  const Json run =
      json_of(std::string("run moe-layer --ranks 2 --iterations 4 --adapt --capacity 5") + kSmall);
  EXPECT_EQ(run.at("correct"), true) << run;
  EXPECT_EQ(run.at("dropped_rows"), 2 * 40 * 2 - 8 * 5);
  EXPECT_GT(run.at("link_gbps"), 0);
  const auto table = run_command(words_of(std::string("run moe-layer --iterations 1") + kSmall), {});
  EXPECT_EQ(table.exit_code, 0) << table.err;
  for (const char* part : {"overlap ratio", "wasted rows", "backlog", "check", "OK"}) {
    EXPECT_NE(table.out.find(part), std::string::npos) << part << " in\n" << table.out;
  }
}

// Every split with every routing, beside a layer that has had 20 calls to adapt.
TEST(MoeCommand, ComparesSplitsWithAdaptation) {
  const std::string line =
      std::string("run moe-layer --ranks 2 --iterations 2 --link-gbps 0 --adapt --splits 1,3 --then stress") +
      kSmall;
  const Json run = json_of(line);
  ASSERT_EQ(run.at("routings").size(), 2U);
  for (const Json& routing : run.at("routings")) {
    ASSERT_EQ(routing.at("static").size(), 2U * 4);
    double best_us = 1e9;
    for (const Json& split : routing.at("static")) best_us = std::min(best_us, split.at("us").get<double>());
    EXPECT_GT(best_us, 0);
    EXPECT_EQ(routing.at("best_us"), best_us);
    EXPECT_GT(routing.at("adapted_us"), 0);
    EXPECT_GT(routing.at("adapted_share"), 0);
    EXPECT_EQ(routing.at("adaptation").size(), 20U);
  }
  EXPECT_EQ(run.at("routings")[0].at("routing"), "balanced");
  EXPECT_EQ(run.at("routings")[1].at("routing"), "stress");
  const auto text = run_command(words_of(line), {});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* part : {"3 consumers, 8 bands", "adapted, from 1 consumers, 2 bands", "over the best"})
    EXPECT_NE(text.out.find(part), std::string::npos) << part;
}

TEST(MoeCommand, RunsAndChecksBackward) {
  for (const char* how : {"--dtype f32", "--dtype f16 --transport collective",
                          "--dtype bf16 --routing stress", "--padding shared", "--capacity 5"}) {
    const Json run = json_of(std::string("run moe-layer --backward --ranks 3 --iterations 2 --link-gbps 0 ") +
                             how + kSmall);
    EXPECT_EQ(run.at("correct"), true) << run;
    const Json& backward = run.at("backward");
    EXPECT_GT(backward.at("serial_us"), 0);
    EXPECT_GT(backward.at("overlap_us"), 0);
    EXPECT_GT(backward.at("serial_phases").at("weights_us"), 0);
    EXPECT_GE(backward.at("other_work_us"), 0);
    for (const char* ratio : {"dispatch_overlap_ratio", "combine_overlap_ratio"}) {
      EXPECT_GE(backward.at(ratio), 0);
      EXPECT_LE(backward.at(ratio), 1);
    }
    const bool drops = run.at("dropped_rows") > 0;
    EXPECT_EQ(run.at("max_relative_gradient_error") > 0, !drops);
  }
  const auto table =
      run_command(words_of(std::string("run moe-layer --backward --iterations 1") + kSmall), {});
  EXPECT_EQ(table.exit_code, 0) << table.err;
  for (const char* part : {"backward", "other work", "elements of gradients", "OK"}) {
    EXPECT_NE(table.out.find(part), std::string::npos) << part << " in\n" << table.out;
  }
}

TEST(MoeCommand, OverlapsWhereThatWins) {
  const std::string rest = std::string(" --ranks 2 --iterations 2 --dtype f16") + kSmall;
  const Json measured = json_of("run moe-layer --overlap-if measured --link-gbps 0" + rest);
  EXPECT_EQ(measured.at("overlap_if"), "measured");
  const std::string way = measured.at("chosen");
  EXPECT_TRUE(way == "serial" || way == "overlapped") << way;
  EXPECT_EQ(measured.at("choice").get<std::string>().substr(0, way.size()), way);
  EXPECT_GT(measured.at("chosen_us"), 0);
  EXPECT_GT(measured.at("chosen_speedup"), 0);
  EXPECT_EQ(measured.at("equals_serial"), true);
  const Json slow =
      json_of("run moe-layer --overlap-if predicted --machine 4x-a100-nvlink --link-gbps 0.5" + rest);
  EXPECT_EQ(slow.at("choice").get<std::string>().substr(0, 10), "predicted,") << slow;
  const Json always = json_of("run moe-layer --link-gbps 0" + rest);
  EXPECT_EQ(always.at("overlap_if"), "always");
  EXPECT_TRUE(always.at("chosen").is_null());
  const auto table = run_command(words_of("run moe-layer --overlap-if measured" + rest), {});
  EXPECT_EQ(table.exit_code, 0) << table.err;
  EXPECT_NE(table.out.find("chosen         measured, "), std::string::npos) << table.out;

  expect_refused("run moe-layer --overlap-if maybe" + rest,
                 "--overlap-if: 'maybe' is not accepted; expected always, measured, predicted");
  expect_refused("run moe-layer --overlap-if predicted" + rest,
                 "--machine: is needed with --overlap-if predicted");
  expect_refused("run moe-layer --machine 4x-a100-nvlink" + rest, "--machine: is for --overlap-if predicted");
}

class RoutingFile {
 public:
  explicit RoutingFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("flashoverlap_" + std::to_string(::getpid()) + "_routing")) {
    std::ofstream(path_) << text;
  }
  ~RoutingFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  RoutingFile(const RoutingFile&) = delete;
  RoutingFile& operator=(const RoutingFile&) = delete;
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

TEST(MoeCommand, ReadsARoutingFile) {
  const std::string rest = std::string(" --ranks 2 --iterations 1 --link-gbps 0") + kSmall;
  const RoutingFile good("0 7:0.25\n-1 3\n5 5\n1:1 2:-0.5\n");
  const Json run = json_of("run moe-layer --routing " + good.path() + rest);
  EXPECT_EQ(run.at("correct"), true) << run;
  EXPECT_EQ(run.at("tokens"), 2);
  EXPECT_EQ(run.at("top_k"), 2);
  const auto refused = [&](const std::string& text, const std::string& message) {
    const RoutingFile file(text);
    expect_refused("run moe-layer --routing " + file.path() + rest,
                   "--routing: '" + file.path() + "'" + message);
  };
  refused("0 1\n0 x\n", ", line 2: 'x' is not an expert; EXPERT or EXPERT:WEIGHT is expected");
  refused("0 1\n0\n", ", line 2: 1 experts; 2 are expected, as in the first line");
  refused("0 1\n", " has 1 tokens; a multiple of the 2 ranks is expected");
  refused("0 1\n0 8\n", ", rank 1: token 0, slot 1 has expert 8; an expert in [0, 8)");
  expect_refused("run moe-layer --routing /nowhere" + rest, "--routing: ");
}

TEST(MoeCommand, PlansAreVerifiedAndPrinted) {
  const std::string line =
      std::string("plan moe-layer --ranks 4 --rank 1 --padding paper --routing stress") + kSmall;
  const auto text = run_command(words_of(line), {});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* part : {"moe-layer, rank 1 of 4, experts 2 to 3 of 8", "combine plan:", "segments:",
                           "wasted rows a rank, balanced", "    256", "verified: the plans of all 4 ranks"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part;
  }
  const auto json = run_command(words_of(line + " --json combine"), {});
  EXPECT_EQ(json.exit_code, 0) << json.err;
  EXPECT_EQ(Json::parse(json.out).at("operation"), "moe-combine");
}

// Where communication takes less than computation, the simulator must see most of the return hidden.
TEST(MoeCommand, SimulatesWhatOverlapHides) {
  const Json result = json_of(
      "simulate moe-layer --machine 4x-a100-nvlink --ranks 4 --experts 16 --tokens 4096 --hidden 2048 "
      "--intermediate 2048 --consumers 4 --dtype f16 --tile-m 128 --tile-n 128");
  EXPECT_LT(result.at("overlap_us"), result.at("serial_us"));
  EXPECT_GT(result.at("combine").at("overlap_ratio"), 0.9);
  for (const char* phase : {"dispatch", "combine"}) {
    EXPECT_GT(result.at(phase).at("compute_us"), 0);
    EXPECT_GE(result.at(phase).at("overlap_us"), result.at(phase).at("compute_us"));
    EXPECT_GE(result.at(phase).at("overlap_ratio"), 0);
    EXPECT_LE(result.at(phase).at("overlap_ratio"), 1);
  }
  // The first rows of others are waited for; the last segment of the return hides behind own tiles.
  EXPECT_GT(result.at("dispatch").at("overlap_us"), result.at("dispatch").at("compute_us"));
}

TEST(MoeCommand, SimulatesBackward) {
  const std::string line =
      "simulate moe-layer --machine 8x-h200-nvlink --ranks 4 --experts 16 --tokens 4096 --hidden 2048 "
      "--intermediate 1024 --consumers 4 --dtype bf16 --tile-m 128 --tile-n 128";
  const Json forward = json_of(line);
  const Json backward = json_of(line + " --backward");
  EXPECT_EQ(forward.at("weights_us"), 0);
  // Forward the first GEMM is the one with both projections, backward the second.
  const auto gemm_us = [](const Json& pass, const char* phase) {
    return pass.at(phase).at("compute_us").get<double>();
  };
  EXPECT_GT(gemm_us(forward, "dispatch"), 1.5 * gemm_us(forward, "combine"));
  EXPECT_GT(gemm_us(backward, "combine"), 1.5 * gemm_us(backward, "dispatch"));
  const double gemms_us = gemm_us(backward, "dispatch") + gemm_us(backward, "combine");
  EXPECT_DOUBLE_EQ(backward.at("weights_us"), gemms_us);
  EXPECT_GE(backward.at("overlap_us"), 2 * gemms_us) << "nothing hides computation";
  EXPECT_GT(backward.at("speedup"), 1);
  EXPECT_DOUBLE_EQ(backward.at("serial_us"), backward.at("dispatch").at("serial_us").get<double>() +
                                                 backward.at("combine").at("serial_us").get<double>() +
                                                 gemms_us);
}

// Between hosts, with little to compute, nothing can be gained; but consumers that all put to the same rank,
// or one after the other what one segment has for several, made the return 1.8 to 7 times slower than serial.
TEST(MoeCommand, PutsUseAllPortsAtATime) {
  for (const char* padding : {"ragged --segment-bands 2", "ragged --segment-bands 64", "shared"}) {
    const Json result = json_of(std::string("simulate moe-layer --machine 2x8-h100-infiniband --ranks 16 "
                                            "--experts 64 --tokens 2048 --hidden 2048 --intermediate 512 "
                                            "--consumers 8 --dtype bf16 --padding ") +
                                padding);
    for (const char* phase : {"dispatch", "combine"}) {
      const double ratio =
          result.at(phase).at("overlap_us").get<double>() / result.at(phase).at("serial_us").get<double>();
      EXPECT_LT(ratio, 1.1) << padding << ", " << phase;
    }
  }
}

TEST(MoeCommand, SimulatesManyRanks) {
  const Json result = json_of(
      "simulate moe-layer --machine 2x8-h100-infiniband --ranks 64 --experts 64 --tokens 64 --hidden 256 "
      "--intermediate 256 --consumers 8 --padding shared --order expert-major --dtype bf16 --tile-m 128 "
      "--tile-n 128");
  EXPECT_GT(result.at("overlap_us"), 0);
  EXPECT_GT(result.at("serial_us"), 0);
}

TEST(MoeCommand, Refusals) {
  expect_refused("run moe-layer --tokens -1",
                 "--tokens: '-1' is not accepted; expected an integer from 0 to ");
  expect_refused("run moe-layer --padding none",
                 "--padding: 'none' is not accepted; expected paper, ragged, shared");
  expect_refused("run moe-layer --top-k 9 --experts 8",
                 "--top-k: '9' is not accepted; expected at most the 8 experts");
  expect_refused("run moe-layer --bogus 1", "--bogus: no such option; accepted: ");
  expect_refused("run --ranks 2 moe-layer", "--ranks: stands before moe-layer; its options belong behind it");
  expect_refused("plan moe-layer --rank 2 --ranks 2",
                 "--rank: '2' is not accepted; expected an integer from 0 to 1");
  expect_refused("simulate moe-layer", "--machine: is needed");
  expect_refused("run moe-layer --backend rocm", "--backend: 'rocm' is not accepted; expected cpu, cuda");
  expect_refused("run moe-layer --then stress", "--then: is for --splits");
  expect_refused("run moe-layer --splits 2", "--splits: needs --adapt");
  expect_refused("run moe-layer --adapt --splits 2 --then none", "--then: ");
  expect_refused("run moe-layer --padding shared --order owner-major",
                 "padding 'shared' lets tiles run over the owners of an expert");
}

TEST(MoeCommand, SaysWhatIsMissingForGpus) {
  const auto result =
      run_command(words_of(std::string("run moe-layer --backend cuda --ranks 2") + kSmall), {});
  EXPECT_EQ(result.exit_code, 2);
  const bool is_said =
      result.err ==
          "flashoverlap: --backend cuda: this build has no GPU executor; build with the "
          "preset cuda (-DFLASHOVERLAP_CUDA=ON)\n" ||
      // Builds with one: f32 is what the command computes when not told otherwise.
      result.err == "flashoverlap: --backend cuda computes bf16 and f16, not f32; add --dtype bf16\n";
  EXPECT_TRUE(is_said) << result.err;
}

}  // namespace
}  // namespace flashoverlap

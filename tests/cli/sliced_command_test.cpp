#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "process.h"

// `flashoverlap run|plan|simulate` for operators whose data travels in slices, as a user runs them.
namespace flashoverlap {
namespace {

using Json = nlohmann::json;
using test::run_command;
using test::words_of;

constexpr const char* kOps[] = {"all-gather-gemm", "sharded-weight-gemm", "gradient-reduce-scatter",
                                "gemm-all-to-all-heads", "all-to-all-gemm"};
constexpr const char* kMethods[] = {"tail-free", "signal", "auto"};
constexpr const char* kSmall = " -m 60 -n 44 -k 20 --ranks 3 --tile-m 8 --tile-n 16 --threads 1";

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
  EXPECT_EQ(result.err.substr(0, 14), "flashoverlap: ");
  EXPECT_NE(result.err.find(message), std::string::npos) << "'" << message << "' is not in: " << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
}

TEST(SlicedCommand, RunChecksEveryOperator) {
  for (const std::string op : kOps) {
    for (const char* how : {" --link-gbps 0", " --link-gbps auto --link-latency-us 1",
                            " --dtype bf16 --parts 2 --send-channels 2"}) {
      const Json run = json_of("run " + op + kSmall + how + " --iterations 2 --baseline-slices 2");
      EXPECT_EQ(run.at("op"), op);
      EXPECT_EQ(run.at("correct"), true) << run;
      EXPECT_EQ(run.at("equals_serial"), true) << run;
      EXPECT_GE(run.at("exposed_us"), 0);
      EXPECT_GE(run.at("exposed_share"), 0);
      EXPECT_GT(run.at("sliced_us"), 0);
      EXPECT_GE(run.at("sliced_exposed_share"), 0);
      EXPECT_NEAR(run.at("slice_ratio").get<double>(),
                  1.5 * run.at("communication_us").get<double>() / run.at("gemm_us").get<double>(), 1e-9);
    }
  }
}

TEST(SlicedCommand, OneRankHasAllOfIt) {
  for (const std::string op : kOps) {
    const Json run = json_of("run " + op + " -m 60 -n 44 -k 20 --ranks 1 --iterations 1 --baseline-slices 3");
    EXPECT_EQ(run.at("correct"), true) << run;
    EXPECT_EQ(run.at("equals_serial"), true) << run;
  }
}

TEST(SlicedCommand, TableNamesWhatIsExposed) {
  const auto result =
      run_command(words_of(std::string("run all-gather-gemm --slices 10,0,50 --iterations 1") + kSmall), {});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* part : {"slices 10,0,50", "tail-free", "4 slices", "exposed communication",
                           "communication takes ", "correct on every rank", "same bits as serial"}) {
    EXPECT_NE(result.out.find(part), std::string::npos) << part << " in\n" << result.out;
  }
}

TEST(SlicedCommand, PlanIsVerifiedAndReadBack) {
  for (const std::string op : kOps) {
    const auto text = run_command(words_of("plan " + op + kSmall + " --rank 2"), {});
    EXPECT_EQ(text.exit_code, 0) << text.err;
    EXPECT_NE(text.out.find("verified: the plans of all 3 ranks"), std::string::npos) << text.out;
    EXPECT_EQ(json_of("plan " + op + kSmall).at("world_size"), 3);
  }
}

TEST(SlicedCommand, SimulationShowsNoTailWhereCommunicationIsShort) {
  for (const std::string op : kOps) {
    const Json sim =
        json_of("simulate " + op + " -m 8192 -n 8192 -k 4096 --dtype f16 --ranks 4 --machine 4x-a100-nvlink");
    EXPECT_EQ(sim.at("simulated"), true);
    EXPECT_GT(sim.at("gemm_us"), 0);
    EXPECT_GT(sim.at("communication_us"), 0);
    EXPECT_LE(sim.at("exposed_us").get<double>(), sim.at("communication_us").get<double>()) << sim;
    EXPECT_LT(sim.at("overlap_us").get<double>(), sim.at("serial_us").get<double>()) << sim;
    EXPECT_LT(sim.at("overlap_us"), sim.at("sliced_us")) << sim;
    // Both may be nothing: what is exposed is measured against the GEMM of the serial call.
    EXPECT_LE(sim.at("exposed_share"), sim.at("sliced_exposed_share")) << sim;
  }
}

// Between hosts all ranks share a link, over which a collective sends less; auto sees it.
TEST(ReduceScatterMethods, AutoIsTheQuickestOnTheMachine) {
  const std::string line =
      "simulate gemm-reduce-scatter -m 8192 -n 2048 -k 8192 --dtype bf16 --ranks 16 --machine "
      "2x8-h100-infiniband --method ";
  const Json tail_free = json_of(line + "tail-free");
  const Json signal = json_of(line + "signal");
  const Json chosen = json_of(line + "auto");
  EXPECT_GT(tail_free.at("overlap_us").get<double>(), tail_free.at("serial_us").get<double>());
  EXPECT_NE(chosen.at("method"), "tail-free");
  for (const Json& other : {tail_free, signal}) {
    for (const char* time : {"overlap_us", "serial_us"})
      EXPECT_LE(chosen.at("overlap_us").get<double>(), 1.005 * other.at(time).get<double>()) << time;
  }
  const auto table = run_command(words_of(line + "auto"), {});
  EXPECT_EQ(table.exit_code, 0) << table.err;
  EXPECT_NE(table.out.find("tail-free: "), std::string::npos) << table.out;
  const auto run = run_command(
      words_of("run gemm-reduce-scatter --method auto --machine 4x-a100-nvlink --dtype f16 --iterations 1"
               " --link-gbps 1 --link-latency-us 1 --no-cache -m 64 -n 32 -k 16 --ranks 2"),
      {});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("serial: "), std::string::npos) << run.out;
}

// What auto comes to where nothing stands against tail-free.
std::string resolved(const std::string& method) {
  return method == "auto" ? "tail-free" : method;
}

TEST(ReduceScatterMethods, RunChecksThemBesideTheirBaselines) {
  for (const std::string method : kMethods) {
    for (const char* how : {" --link-gbps 0", " --slices 10,0,50", " --dtype bf16 --parts 3"}) {
      const Json run = json_of("run gemm-reduce-scatter --no-cache --method " + method + kSmall + how +
                               " --iterations 2 --baseline-slices 2");
      EXPECT_EQ(run.at("method"), resolved(method));
      EXPECT_EQ(run.at("correct"), true) << run;
      EXPECT_EQ(run.at("equals_serial"), true) << run;
      EXPECT_GT(run.at("sliced_us"), 0);
      for (const char* share : {"exposed_share", "serial_exposed_share", "sliced_exposed_share"})
        EXPECT_GE(run.at(share), 0) << share;
    }
  }
  EXPECT_FALSE(
      json_of(std::string("run gemm-reduce-scatter --no-cache --iterations 1") + kSmall).contains("method"));
  // A partition is of signals.
  const Json partition = json_of(
      "run gemm-reduce-scatter --method auto -m 8 -n 8 -k 8 --tile-m 4 --tile-n 8"
      " --partition 1,1 --no-cache --iterations 1");
  EXPECT_EQ(partition.at("method"), "signal");
}

TEST(ReduceScatterMethods, TableSaysWhatIsExposedAndWhereThePartsAreFrom) {
  const std::string line =
      std::string("run gemm-reduce-scatter --method tail-free --no-cache --iterations 1") +
      " --link-gbps 0.1 --link-latency-us 10" + kSmall;
  const auto expect = [&](const std::string& more, const std::vector<std::string>& parts) {
    const auto result =
        run_command(words_of(line + more), {.environment = {{"XDG_CACHE_HOME", "/nonexistent"}}});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    for (const std::string& part : parts)
      EXPECT_NE(result.out.find(part), std::string::npos) << part << " in\n" << result.out;
  };
  expect("", {"method tail-free, slices equal", "\nserial ", "\n4 slices ", "\ntail-free ",
              "exposed communication", "default: as few parts as leave no tail", "same bits as serial"});
  expect(" --parts 2", {"default: 2 parts a slice, given"});
  expect(" --machine 4x-rtx4090-pcie --dtype f16", {"chosen", "predicted: ", " us simulated; "});
}

TEST(ReduceScatterMethods, PlanIsWhatRunCarriesOut) {
  for (const std::string method : kMethods) {
    const Json plan = json_of("plan gemm-reduce-scatter --method " + method + kSmall + " --slices 10,0,50");
    std::set<std::string> kinds;
    for (const Json& transfer : plan.at("transfers")) kinds.insert(transfer.at("kind"));
    EXPECT_EQ(kinds.contains("reduce-scatter"), method == "signal") << plan;
    EXPECT_EQ(kinds.contains("send"), method != "signal") << plan;
  }
}

TEST(ReduceScatterMethods, SimulationComparesThem) {
  const std::string shape = " -m 8192 -n 4096 -k 4096 --dtype f16 --ranks 4 --machine 4x-a100-nvlink";
  for (const std::string method : kMethods) {
    const Json sim = json_of("simulate gemm-reduce-scatter --method " + method + shape);
    EXPECT_EQ(sim.at("method"), resolved(method));
    EXPECT_EQ(sim.contains("parts"), method != "signal");
    EXPECT_LT(sim.at("overlap_us"), sim.at("sliced_us"));
    EXPECT_LT(sim.at("sliced_us"), sim.at("serial_us"));
    EXPECT_LT(sim.at("exposed_share"), sim.at("sliced_exposed_share"));
    EXPECT_LT(sim.at("sliced_exposed_share"), sim.at("serial_exposed_share"));
  }
  const Json sweep = json_of("simulate gemm-reduce-scatter --method tail-free --sweep ranks=2,3" + shape);
  for (const Json& row : sweep.at("rows")) EXPECT_LE(row.at("exposed_share"), 0.005) << row;
  const auto table =
      run_command(words_of("simulate gemm-reduce-scatter --method tail-free --parts 2" + shape), {});
  EXPECT_EQ(table.exit_code, 0) << table.err;
  for (const char* part : {"2 parts: ", "\n4 slices ", "\ntail-free ", "exposed communication"})
    EXPECT_NE(table.out.find(part), std::string::npos) << part << " in\n" << table.out;
}

// As the operator: auto is the quickest of the three on slices of these sizes, too.
TEST(ReduceScatterMethods, SlicesOfGivenSizesAreSimulatedByEveryMethod) {
  const std::string shape = " -m 4096 -n 2048 -k 2048 --dtype f16 --ranks 4 --machine 4x-a100-nvlink";
  for (const std::string sizes : {"1000,1500,500,1096", "4096,0,0,0"}) {
    const std::string options = shape + " --slices " + sizes;
    const Json tail_free = json_of("simulate gemm-reduce-scatter --method tail-free" + options);
    const Json signal = json_of("simulate gemm-reduce-scatter --method signal" + options);
    const Json chosen = json_of("simulate gemm-reduce-scatter --method auto" + options);
    EXPECT_LE(signal.at("overlap_us"), signal.at("serial_us"));
    constexpr double kAlike = 1.005;
    EXPECT_LE(
        chosen.at("overlap_us").get<double>(),
        kAlike * std::min({tail_free.at("overlap_us").get<double>(), signal.at("overlap_us").get<double>(),
                           signal.at("serial_us").get<double>()}));
    const Json& of_choice = chosen.at("method") == "tail-free" ? tail_free : signal;
    EXPECT_EQ(chosen.at("overlap_us"), of_choice.at("overlap_us"));
    const std::string reason = chosen.at("method_reason");
    for (const char* way : {"tail-free", "signal", "serial"})
      EXPECT_NE(reason.find(way), std::string::npos) << reason;
  }
}

// On a link that is slower than the GEMM finer slices pay, and auto finds them.
TEST(SlicedCommand, PartsAreChosenOnAKnownMachine) {
  const std::string machine = " --dtype f16 --ranks 4 --machine 4x-rtx4090-pcie";
  for (const std::string op : {"all-gather-gemm", "gemm-reduce-scatter --method tail-free"}) {
    const std::string line = "simulate " + op + " -m 2048 -n 1024 -k 4096" + machine;
    const Json chosen = json_of(line);
    for (const char* parts : {"1", "2", "4", "8"}) {
      EXPECT_LE(chosen.at("overlap_us").get<double>(),
                1.005 * json_of(line + " --parts " + parts).at("overlap_us").get<double>())
          << op << " in " << parts << " parts";
    }
  }
  const auto run =
      run_command(words_of("run all-gather-gemm --machine 4x-rtx4090-pcie --dtype f16 --iterations 1"
                           " --link-gbps 0 --link-latency-us 1 -m 64 -n 32 -k 16 --ranks 2"),
                  {});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find(" us simulated"), std::string::npos) << run.out;
  expect_refused("run all-gather-gemm --machine nowhere", "nowhere");
}

TEST(SlicedCommand, LayersAreCheckedAgainstTheirWholeSelves) {
  const std::string layers[] = {"mlp-tpsp --tokens 50 --hidden 24 --inner 30",
                                "linear-dp --samples 20 --in 17 --out 31",
                                "attention-tpsp --tokens 43 --heads 6 --head-size 5",
                                "attention-up --tokens 40 --heads 5 --head-size 4"};
  for (const std::string& layer : layers) {
    for (const char* how : {" --ranks 3 --link-gbps 0", " --ranks 2 --link-latency-us 1", " --ranks 1",
                            " --ranks 3 --dtype bf16", " --ranks 2 --dtype f16 --link-gbps 0"}) {
      const Json run = json_of("run " + layer + how + " --threads 1 --iterations 2");
      EXPECT_EQ(run.at("backend"), "cpu");
      EXPECT_EQ(run.at("machine"), "cpu backend, 1 compute thread per rank");
      EXPECT_EQ(run.at("layer"), layer.substr(0, layer.find(' ')));
      EXPECT_EQ(run.at("correct"), true) << run;
      EXPECT_EQ(run.at("equals_serial"), true) << run;
      EXPECT_GT(run.at("max_error"), 0) << run;
      EXPECT_EQ(run.at("sliced_us").is_null(), layer.starts_with("attention-up")) << run;
      EXPECT_GE(run.at("exposed_share"), 0) << run;
    }
  }
  const auto slices = run_command(words_of("run attention-tpsp --tokens 40 --heads 2 --head-size 8 --ranks 2 "
                                           "--iterations 1 --baseline-slices 3"),
                                  {});
  EXPECT_EQ(slices.exit_code, 0) << slices.err;
  EXPECT_NE(slices.out.find("\n3 slices "), std::string::npos) << slices.out;
  EXPECT_NE(slices.out.find("x over slices\n"), std::string::npos) << slices.out;
  const auto table = run_command(
      words_of("run attention-up --tokens 40 --heads 4 --head-size 8 --ranks 3 --iterations 1"), {});
  EXPECT_EQ(table.exit_code, 0) << table.err;
  for (const char* part : {"attention-up  tokens=40 heads=4 head-size=8 f32, 3 ranks",
                           "exposed communication", "correct on every rank", "same bits as serial"}) {
    EXPECT_NE(table.out.find(part), std::string::npos) << part << " in\n" << table.out;
  }
}

// A layer is its operators one after the other, with attention between them or within the second.
TEST(SlicedCommand, LayersAreSimulatedAsTheirOperators) {
  const std::string machine = " --dtype f16 --ranks 4 --machine 4x-a100-nvlink";
  struct LayerCase {
    std::string layer, first, second;
    bool has_attention;
  };
  // gradient-reduce-scatter has the plans of gemm-reduce-scatter.
  const LayerCase cases[] = {
      {"mlp-tpsp --tokens 8192 --hidden 4096 --inner 16384", "all-gather-gemm -m 8192 -n 4096 -k 4096",
       "gradient-reduce-scatter -m 8192 -n 4096 -k 4096", false},
      {"linear-dp --samples 8192 --in 4096 --out 2048", "sharded-weight-gemm -m 8192 -n 2048 -k 4096",
       "gradient-reduce-scatter -m 2048 -n 4096 -k 8192", false},
      {"attention-tpsp --tokens 4096 --heads 32 --head-size 128", "all-gather-gemm -m 4096 -n 3072 -k 4096",
       "gradient-reduce-scatter -m 4096 -n 4096 -k 1024", true},
      {"attention-up --tokens 8192 --heads 32 --head-size 128",
       "gemm-all-to-all-heads -m 8192 -n 12288 -k 4096", "all-to-all-gemm -m 8192 -n 4096 -k 4096", true}};
  for (const LayerCase& c : cases) {
    const Json layer = json_of("simulate " + c.layer + machine);
    const Json first = json_of("simulate " + c.first + machine);
    const Json second = json_of("simulate " + c.second + machine);
    const auto both = [&](const char* key) {
      return first.at(key).get<double>() + second.at(key).get<double>();
    };
    EXPECT_EQ(layer.at("simulated"), true);
    EXPECT_NEAR(layer.at("communication_us"), both("communication_us"), 1e-6) << layer;
    const double attention_us = layer.at("computation_us").get<double>() - both("gemm_us");
    if (c.has_attention) {
      // Two products with tokens times tokens scores of each head.
      EXPECT_GT(attention_us, 0.2 * both("gemm_us")) << layer;
    } else {
      EXPECT_NEAR(attention_us, 0, 1e-6) << layer;
      EXPECT_NEAR(layer.at("serial_us"), both("serial_us"), 1e-6) << layer;
    }
    EXPECT_LT(layer.at("overlap_us"), layer.at("sliced_us")) << layer;
    EXPECT_LT(layer.at("sliced_us"), layer.at("serial_us")) << layer;
    EXPECT_LE(layer.at("exposed_share"), 0.01) << layer;
  }
  const auto table = run_command(words_of("simulate attention-up --heads 30" + machine), {});
  EXPECT_EQ(table.exit_code, 0) << table.err;
  for (const char* part : {"attention-up  tokens=512 heads=30", "all-to-all-gemm: ", "4 slices", "tail-free"})
    EXPECT_NE(table.out.find(part), std::string::npos) << part << " in\n" << table.out;
}

TEST(SlicedCommand, BadOptionsSayWhatIsExpected) {
  expect_refused("simulate mlp-tpsp", "--machine: is needed");
  expect_refused("simulate mlp-tpsp --inner 10 --ranks 4 --machine 4x-a100-nvlink",
                 "--inner: '10' is not accepted; expected a multiple of the 4 ranks");
  expect_refused("run mlp-tpsp --inner 10 --ranks 4",
                 "--inner: '10' is not accepted; expected a multiple of the 4 ranks");
  expect_refused("run attention-tpsp --heads 6 --ranks 4",
                 "--heads: '6' is not accepted; expected a multiple of the 4 ranks");
  expect_refused("run attention-up --baseline-slices 2", "--baseline-slices: no such option");
  expect_refused("run mlp-tpsp --dtype f64", "--dtype: 'f64' is not accepted; expected f32, bf16, f16");
  expect_refused("run linear-dp --comm mpi",
                 "--comm: 'mpi' is not accepted; expected nccl, local, copy-engine");
  expect_refused("run --ranks 2 attention-up",
                 "--ranks: stands before attention-up; its options belong behind it");
  expect_refused("run all-to-all-gemm --slices 1,2 -k 5 --ranks 2", "slice sizes 1,2 sum to 3; expected 5");

  expect_refused("run all-gather-gemm --slices 1,2 -m 60 --ranks 3 -n 4 -k 4",
                 "there are 2 slice sizes (1,2); expected one for each of 3 ranks");
  expect_refused("plan gemm-reduce-scatter --method tail-free --slices 1,2,3 -m 60 --ranks 3",
                 "slice sizes 1,2,3 sum to 6; expected 60");
  expect_refused("plan all-gather-gemm --ranks 3 --rank 3", "--rank: '3' is not accepted");
  expect_refused("simulate all-gather-gemm", "--machine: is needed");
  expect_refused("run gemm-reduce-scatter --method tail",
                 "--method: 'tail' is not accepted; expected signal, tail-free, auto");
  expect_refused("run gemm-all-reduce --method signal", "--method: does not apply to gemm-all-reduce");
  for (const char* option : {"--parts 2", "--send-channels 2", "--slices 1,2", "--baseline-slices 3"}) {
    const std::string words = option;
    expect_refused("run gemm-reduce-scatter " + words,
                   words.substr(0, words.find(' ')) + ": is for --method signal, tail-free or auto");
  }
  expect_refused("run gemm-reduce-scatter --method auto --rows block-cyclic",
                 "--rows: block-cyclic does not go with --method: rank r keeps slice r of the rows");
  expect_refused("run gemm-reduce-scatter --method tail-free --partition 1,2",
                 "--partition: partition 1,2 does not apply to tail-free plans: slices take its place");
  for (const char* command : {"run", "plan"}) {
    expect_refused(
        std::string(command) + " gemm-reduce-scatter --method tail-free --ranks 65",
        "--method: tail-free takes a thread for each pair of ranks, so at most 64 ranks; --ranks is 65");
  }
  expect_refused("run -m 5 all-gather-gemm",
                 "--m: stands before all-gather-gemm; its options belong behind it");
}

}  // namespace
}  // namespace flashoverlap

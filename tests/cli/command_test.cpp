#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "process.h"

// The built command, run as a user runs it.
namespace flashoverlap {
namespace {

using Json = nlohmann::json;
using test::ProcessOptions;
using test::ProcessResult;
using test::run_command;
using test::words_of;

ProcessResult run(const std::string& line, const ProcessOptions& options = {}) {
  return run_command(words_of(line), options);
}

/// What every refusal looks like: exit code 2, nothing on stdout, one line on stderr: the command's name and
/// the message, which may end with "…" where what follows does not matter.
void expect_refused(const ProcessResult& result, std::string message) {
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
  const std::string more = "…";
  if (!message.ends_with(more)) {
    EXPECT_EQ(result.err, "flashoverlap: " + message + "\n");
    return;
  }
  message.erase(message.size() - more.size());
  EXPECT_EQ(result.err.substr(0, 14 + message.size()), "flashoverlap: " + message);
}

Json run_json(const std::string& line) {
  const ProcessResult result = run(line + " --json");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return Json::parse(result.out);
}

/// A file of this test's own, removed at its end.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& name)
      : path_(std::filesystem::temp_directory_path() /
              ("flashoverlap_" + std::to_string(::getpid()) + "_" + name)) {}
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] std::string path() const { return path_.string(); }
  [[nodiscard]] bool exists() const { return std::filesystem::exists(path_); }
  void write(const std::string& text) const { std::ofstream(path_) << text; }
  [[nodiscard]] std::string read() const {
    std::ostringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }

 private:
  std::filesystem::path path_;
};

constexpr const char* kTiny = " -m 70 -n 50 -k 20 --tile-m 32 --tile-n 16 --iterations 1";

TEST(Command, HelpAndVersion) {
  const ProcessResult version = run("--version");
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out, "flashoverlap 0.1.0\n");
  EXPECT_EQ(version.err, "");
  for (const char* line : {"--help", "run --help", "plan -h", "doctor --help"}) {
    const ProcessResult help = run(line);
    EXPECT_EQ(help.exit_code, 0) << line;
    EXPECT_NE(help.out.find("Usage:"), std::string::npos) << line;
    EXPECT_EQ(help.err, "") << line;
  }
}

struct Refusal {
  const char* line;
  const char* message;
};

class RefusedLine : public testing::TestWithParam<Refusal> {};

TEST_P(RefusedLine, SaysWhatIsWrongAndWhatIsAccepted) {
  expect_refused(run(GetParam().line), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Words, RefusedLine,
    testing::Values(
        Refusal{"frobnicate", "'frobnicate' is not a command; accepted: run, plan, doctor…"},
        Refusal{"--frobnicate", "--frobnicate: no such option; accepted: --help, --version"},
        Refusal{"run gemm",
                "OP: 'gemm' is not accepted; expected gemm-all-reduce, gemm-reduce-scatter, gemm-all-to-all"},
        Refusal{"run gemm-all-reduce again", "argument not expected: again"},
        Refusal{"doctor again", "argument not expected: again"},
        Refusal{"doctor --fix 3", "--fix: no such option; accepted: --help, --json"}));

INSTANTIATE_TEST_SUITE_P(
    Values, RefusedLine,
    testing::Values(
        Refusal{"run --m", "--m: needs a value: INTEGER missing"},
        Refusal{"run -m 5 -m 6", "--m: expected once, given this often: 2"},
        Refusal{"run --m abc", "--m: 'abc' is not accepted; expected an integer from 0 to 1099511627776"},
        Refusal{"run -m -5", "--m: '-5' is not accepted; expected an integer from 0 to 1099511627776"},
        Refusal{"run -n 1e3", "--n: '1e3' is not accepted; expected an integer from 0 to 1099511627776"},
        Refusal{"run --k 4abc", "--k: '4abc' is not accepted; expected an integer from 0 to 1099511627776"},
        Refusal{"run -k 99999999999999999999",
                "--k: '99999999999999999999' is not accepted; expected an integer from 0 to 1099511627776"},
        Refusal{"run --ranks 0", "--ranks: '0' is not accepted; expected an integer from 1 to 1024"},
        Refusal{"run --ranks 1025", "--ranks: '1025' is not accepted; expected an integer from 1 to 1024"},
        Refusal{"run --threads 0",
                "--threads: '0' is not accepted; expected auto or an integer from 1 to 1024"},
        Refusal{"run --threads 1024 --ranks 5",
                "--threads: 1024 for each of --ranks 5 are not accepted; expected at most 4096 together"},
        Refusal{"run --dtype f64", "--dtype: 'f64' is not accepted; expected f32, bf16, f16"},
        Refusal{"run --tile-m 0",
                "--tile-m: '0' is not accepted; expected auto or an integer from 1 to 1099511627776"},
        Refusal{"run --tile-n -1",
                "--tile-n: '-1' is not accepted; expected auto or an integer from 1 to 1099511627776"},
        Refusal{"run --swizzle x",
                "--swizzle: 'x' is not accepted; expected auto or an integer from 1 to 1099511627776"},
        Refusal{"run --partition 1,,2",
                "--partition: '1,,2' is not accepted; expected integers from 1 to 1099511627776 with commas "
                "between"},
        Refusal{"run --partition 0,1",
                "--partition: '0,1' is not accepted; expected integers from 1 to 1099511627776 with commas "
                "between"},
        Refusal{"run gemm-reduce-scatter --rows cyclic",
                "--rows: 'cyclic' is not accepted; expected contiguous, block-cyclic"},
        Refusal{"run gemm-all-to-all --skew 1.5",
                "--skew: '1.5' is not accepted; expected a number from 0 to 1"},
        Refusal{"run gemm-all-to-all --skew nan",
                "--skew: 'nan' is not accepted; expected a number from 0 to 1"},
        Refusal{"run --link-gbps fast",
                "--link-gbps: 'fast' is not accepted; expected auto, 0 or a number from 0.001 to 1000000"},
        Refusal{"run --link-gbps -1",
                "--link-gbps: '-1' is not accepted; expected auto, 0 or a number from 0.001 to 1000000"},
        Refusal{"run --link-latency-us inf",
                "--link-latency-us: 'inf' is not accepted; expected a number from 0 to 1000000"},
        Refusal{"run --iterations 0",
                "--iterations: '0' is not accepted; expected an integer from 1 to 1000000"},
        Refusal{"run --seed -1",
                "--seed: '-1' is not accepted; expected an integer from 0 to 18446744073709551615"},
        Refusal{"plan --rank 2",
                "--rank: '2' is not accepted; expected an integer from 0 to 1, below --ranks"}));

INSTANTIATE_TEST_SUITE_P(
    Combinations, RefusedLine,
    testing::Values(
        Refusal{"run --skew 0.5", "--skew: does not apply to gemm-all-reduce; only to gemm-all-to-all"},
        Refusal{"run gemm-all-to-all --rows contiguous",
                "--rows: does not apply to gemm-all-to-all; only to gemm-reduce-scatter"},
        Refusal{"run gemm-reduce-scatter --rows-to-rank 1,2",
                "--rows-to-rank: does not apply to gemm-reduce-scatter; only to gemm-all-to-all"},
        Refusal{"run gemm-all-to-all --rows-to-rank 1,2,3",
                "--rows-to-rank: has 3 numbers; expected one for each of --ranks 2"},
        Refusal{"run gemm-all-to-all --rows-to-rank 1,2 -m 4", "--rows-to-rank: sums to 3; expected --m 4"},
        Refusal{"run gemm-all-to-all --rows-to-rank 1,2 --skew 0",
                "--skew: cannot be given together with --rows-to-rank"},
        Refusal{"plan --load x --ranks 2", "--ranks: cannot be given together with --load"},
        Refusal{"run -m 64 -n 64 -k 8 --tile-m 64 --tile-n 64 --partition 1,2",
                "--partition: partition 1,2 sums to 3 waves, but the plan has 1…"},
        Refusal{"plan -m 64 -n 64 -k 8 --tile-m 64 --tile-n 64 --partition 1,2",
                "--partition: partition 1,2 sums to 3 waves, but the plan has 1…"}));

TEST(Command, NoCommandIsRefused) {
  expect_refused(run(""), "no command given; accepted: run, plan, doctor…");
}

TEST(Command, TooLargeIsRefusedBeforeAnyWork) {
  const ProcessResult result = run("run -m 1000000000 -n 1000000000 -k 1");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.find("flashoverlap: --m, --n, --k, --ranks, --tile-m, --tile-n: this takes about"), 0U)
      << result.err;
}

TEST(Command, EmptyValuesAreRefused) {
  for (const char* option : {"--m", "--partition", "--dtype", "--link-gbps", "--seed", "--tile-m"}) {
    const ProcessResult result = run_command({"run", option, ""});
    EXPECT_EQ(result.exit_code, 2) << option;
    EXPECT_EQ(result.err.find(std::string("flashoverlap: ") + option + ": '' is not accepted; expected "), 0U)
        << result.err;
  }
}

TEST(Command, MessagesStayOnOneLine) {
  const ProcessResult result = run_command({"run", "--trace", "/nonexistent/a\nb\tc"});
  expect_refused(result, "--trace: cannot write '/nonexistent/a b c': No such file or directory");
}

TEST(Command, JsonHasAllKeys) {
  const Json json = run_json(std::string("run gemm-all-reduce --seed 7 --ranks 3") + kTiny);
  for (const char* key : {"op",
                          "backend",
                          "communicator",
                          "ranks",
                          "m",
                          "n",
                          "k",
                          "dtype",
                          "tile_m",
                          "tile_n",
                          "waves",
                          "partition",
                          "gemm_us",
                          "communication_us",
                          "serial_us",
                          "overlap_us",
                          "bound_us",
                          "speedup",
                          "share_of_possible_gain",
                          "max_error",
                          "tolerance",
                          "correct",
                          "seed",
                          "version"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_EQ(json.at("op"), "gemm-all-reduce");
  EXPECT_EQ(json.at("backend"), "cpu");
  EXPECT_EQ(json.at("communicator"), "in-process");
  EXPECT_EQ(json.at("ranks"), 3);
  EXPECT_EQ(json.at("m"), 70);
  EXPECT_EQ(json.at("n"), 50);
  EXPECT_EQ(json.at("k"), 20);
  EXPECT_EQ(json.at("dtype"), "f32");
  EXPECT_EQ(json.at("tile_m"), 32);
  EXPECT_EQ(json.at("tile_n"), 16);
  EXPECT_EQ(json.at("tiles"), 12);
  EXPECT_EQ(json.at("seed"), 7);
  EXPECT_EQ(json.at("correct"), true);
  EXPECT_LE(json.at("max_error").get<double>(), json.at("tolerance").get<double>());
  std::int64_t waves = 0;
  for (const Json& group : json.at("partition")) waves += group.get<std::int64_t>();
  EXPECT_EQ(json.at("waves"), waves);
  EXPECT_EQ(json.at("bound_us"),
            std::max(json.at("gemm_us").get<double>(), json.at("communication_us").get<double>()));
  EXPECT_DOUBLE_EQ(json.at("speedup"),
                   json.at("serial_us").get<double>() / json.at("overlap_us").get<double>());
}

TEST(Command, EveryOperatorAndTypeIsCorrect) {
  for (const char* op : {"gemm-all-reduce", "gemm-reduce-scatter", "gemm-reduce-scatter --rows block-cyclic",
                         "gemm-all-to-all", "gemm-all-to-all --skew 0.7", "gemm-all-to-all --skew 1"}) {
    for (const char* dtype : {"f32", "bf16", "f16"}) {
      const std::string line =
          std::string("run ") + op + " --dtype " + dtype + " --ranks 3 --link-gbps 0" + kTiny;
      const Json json = run_json(line);
      EXPECT_EQ(json.at("correct"), true) << line;
      EXPECT_EQ(json.at("equals_serial"), true) << line;
      EXPECT_EQ(json.at("dtype"), dtype);
    }
  }
}

TEST(Command, RowsToRankDecidesTheRouting) {
  const Json json = run_json("run gemm-all-to-all --rows-to-rank 0,40,2 --ranks 3 -n 16 -k 8 --iterations 1");
  EXPECT_EQ(json.at("m"), 42);
  EXPECT_EQ(json.at("correct"), true);
}

TEST(Command, EmptyShapesGiveEmptyResults) {
  for (const char* shape : {"-m 0 -n 8 -k 8", "-m 8 -n 0 -k 8", "-m 8 -n 8 -k 0", "-m 0 -n 0 -k 0"}) {
    for (const char* op : {"gemm-all-reduce", "gemm-reduce-scatter", "gemm-all-to-all"}) {
      const Json json = run_json(std::string("run ") + op + " " + shape + " --iterations 1");
      EXPECT_EQ(json.at("correct"), true) << op << shape;
    }
  }
}

TEST(Command, TableShowsWhatWasMeasured) {
  const ProcessResult result =
      run(std::string("run gemm-all-reduce --link-gbps 0.5 --link-latency-us 20") + kTiny);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* text :
       {"gemm-all-reduce  m=70 n=50 k=20 f32, 2 ranks", "paced to 0.5 GB/s and 20 us",
        "tiles of 32x16: 12, waves: 12", "GEMM alone", "communication alone", "serial", "overlapped", "bound",
        "speed-up", "correct on every rank", "tolerance", "rank 0 overlapped, compute 0", "rank 1 serial"}) {
    EXPECT_NE(result.out.find(text), std::string::npos) << text << "\n" << result.out;
  }
}

TEST(Command, PlanIsVerifiedAndRoundTrips) {
  const std::string shape = " -m 70 -n 50 -k 20 --tile-m 32 --tile-n 16 --ranks 3";
  for (const char* op :
       {"gemm-all-reduce --partition 4,4,4", "gemm-reduce-scatter", "gemm-all-to-all --skew 0.5"}) {
    const std::string line = std::string("plan ") + op + shape + " --threads 1 --rank 2";
    const ProcessResult text = run(line);
    EXPECT_EQ(text.exit_code, 0) << text.err;
    EXPECT_NE(text.out.find("verified: the plans of all 3 ranks"), std::string::npos) << text.out;

    const ProcessResult json = run(line + " --json");
    EXPECT_EQ(Json::parse(json.out).at("rank"), 2);
    const TemporaryFile file("plan.json");
    file.write(json.out);
    EXPECT_EQ(run("plan --json --load " + file.path()).out, json.out) << line;
    EXPECT_NE(run("plan --load " + file.path()).out.find("verified"), std::string::npos);
  }
}

TEST(Command, RunCarriesOutThePlanThatPlanPrints) {
  const std::string options = "gemm-reduce-scatter -m 70 -n 50 -k 20 --tile-m 32 --tile-n 16 --threads 1";
  const Json plan = Json::parse(run("plan " + options + " --json").out);
  const Json result = run_json("run " + options + " --iterations 1 --link-gbps 0");
  EXPECT_EQ(plan.at("schedule").size(), result.at("tiles"));
  EXPECT_EQ(plan.at("groups").size(), result.at("partition").size());
}

TEST(Command, BadPlanFilesAreRefused) {
  const TemporaryFile file("bad_plan.json");
  expect_refused(run("plan --load " + file.path()),
                 "--load: cannot read '" + file.path() + "': No such file or directory");
  expect_refused(run("plan --load /tmp"), "--load: cannot read '/tmp': Is a directory");
  for (const char* text : {"", "{", "[]", "{}", "nonsense"}) {
    file.write(text);
    const ProcessResult result = run("plan --load " + file.path());
    EXPECT_EQ(result.exit_code, 2) << text;
    EXPECT_EQ(result.err.find("flashoverlap: --load: '" + file.path() + "': "), 0U) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST(Command, TraceHoldsEveryRank) {
  const TemporaryFile file("trace.json");
  const ProcessResult result = run("run --ranks 3 --trace " + file.path() + kTiny);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::set<int> ranks;
  std::set<std::string> categories;
  const Json trace = Json::parse(file.read());
  for (const Json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    ranks.insert(event.at("pid").get<int>());
    categories.insert(event.at("cat").get<std::string>());
    EXPECT_GE(event.at("dur").get<double>(), 0);
    EXPECT_GE(event.at("ts").get<double>(), 0);
  }
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2}));
  EXPECT_TRUE(categories.contains("compute"));
  EXPECT_TRUE(categories.contains("communication"));
}

TEST(Command, UnwritableTraceIsRefusedBeforeAnyWork) {
  // Work of this size would take hours.
  const std::string line = "run -m 20000 -n 20000 -k 100 --iterations 1000000 --trace ";
  expect_refused(run(line + "/nonexistent/x.json"),
                 "--trace: cannot write '/nonexistent/x.json': No such file or directory");
  expect_refused(run(line + "/tmp"), "--trace: cannot write '/tmp': Is a directory");
}

TEST(Command, ARefusedRunWritesNothing) {
  const TemporaryFile file("untouched.json");
  const std::string line =
      "run -m 64 -n 64 -k 8 --tile-m 64 --tile-n 64 --partition 1,2 --trace " + file.path();
  EXPECT_EQ(run(line).exit_code, 2);
  EXPECT_FALSE(file.exists());
  file.write("precious");
  EXPECT_EQ(run(line).exit_code, 2);
  EXPECT_EQ(file.read(), "precious");
}

TEST(Command, FullOutputIsAnError) {
  const ProcessOptions full{.environment = {}, .stdout_path = "/dev/full"};
  for (const char* line : {"doctor", "plan -m 8 -n 8 -k 8", "run -m 8 -n 8 -k 8 --json"}) {
    const ProcessResult result = run(line, full);
    EXPECT_EQ(result.exit_code, 2) << line;
    EXPECT_EQ(result.err, "flashoverlap: cannot write to standard output\n") << line;
  }
}

TEST(Command, DoctorSaysWhatThereIs) {
  const ProcessResult text = run("doctor");
  EXPECT_EQ(text.exit_code, 0);
  const Json json = Json::parse(run("doctor --json").out);
  EXPECT_GE(json.at("cores"), 1);
  for (const char* name : {"BLAS", "MPI", "CUDA", "NCCL", "NVSHMEM"}) {
    EXPECT_NE(text.out.find(name), std::string::npos) << text.out;
    const Json& component = json.at("components").at(name);
    // What cannot be used has a reason; what is used is there.
    EXPECT_NE(component.at("usable").get<bool>(), !component.at("reason").get<std::string>().empty()) << name;
    EXPECT_TRUE(component.at("found").get<bool>() || !component.at("usable").get<bool>()) << name;
  }
  EXPECT_NE(json.at("components").at("BLAS").at("detail").get<std::string>().find("OpenBLAS"),
            std::string::npos);
  const ProcessOptions no_nccl{.environment = {{"FLASHOVERLAP_NCCL_LIBRARY", "/nonexistent/nccl.so"}}};
  EXPECT_EQ(Json::parse(run("doctor --json", no_nccl).out).at("components").at("NCCL").at("reason"),
            "FLASHOVERLAP_NCCL_LIBRARY names /nonexistent/nccl.so, which cannot be loaded as NCCL");
  const ProcessOptions no_nvshmem{
      .environment = {{"FLASHOVERLAP_NVSHMEM_LIBRARY", "/nonexistent/nvshmem.so"}}};
  EXPECT_EQ(Json::parse(run("doctor --json", no_nvshmem).out).at("components").at("NVSHMEM").at("reason"),
            "FLASHOVERLAP_NVSHMEM_LIBRARY names /nonexistent/nvshmem.so, which cannot be loaded as NVSHMEM");
}

// Otherwise every process would be a job of its own, and each would report a result.
TEST(Command, ALauncherThatMpiDoesNotFindIsRefused) {
#ifdef FLASHOVERLAP_SANITIZED
  GTEST_SKIP() << "initialises MPI";
#endif
  const ProcessOptions foreign{
      .environment = {
          {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}}};
  const ProcessResult result = run(std::string("run") + kTiny, foreign);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  const bool has_mpi = result.err.find("built without MPI") == std::string::npos;
  const char* expected =
      has_mpi ? "the environment of Hydra says that this is process 0 of 2, but " : "one of 2 processes";
  EXPECT_NE(result.err.find(expected), std::string::npos) << result.err;
}

// known-faults.md, B35.
TEST(Command, EnvironmentIsReadStrictly) {
  const std::string line = std::string("run --json") + kTiny;
  for (const char* value : {" 4 ", "4abc", "1e3", "-1", "0", "99999999999999999999", "abc"}) {
    const ProcessResult result = run(line, {.environment = {{"FLASHOVERLAP_TIMEOUT_MS", value}}});
    EXPECT_EQ(result.exit_code, 2) << value;
    const std::string expected =
        std::string("flashoverlap: environment variable FLASHOVERLAP_TIMEOUT_MS is '") + value +
        "'; accepted: ";
    EXPECT_EQ(result.err.find(expected), 0U) << result.err;
  }
  for (const char* value : {"", "30000"}) {
    EXPECT_EQ(run(line, {.environment = {{"FLASHOVERLAP_TIMEOUT_MS", value}}}).exit_code, 0) << value;
  }
  // Not ours, and common: neither may change a result.
  const ProcessOptions odd{.environment = {{"OPENBLAS_NUM_THREADS", "abc"}, {"OMP_NUM_THREADS", "-3"}}};
  EXPECT_EQ(run(line, odd).exit_code, 0);
}

}  // namespace
}  // namespace flashoverlap

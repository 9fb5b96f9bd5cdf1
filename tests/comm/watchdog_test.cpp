#include "flashoverlap/watchdog.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <latch>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "flashoverlap/error.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/operators.h"

// The report of ranks in one process. Processes' own: tests/failures.
namespace flashoverlap::test {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

class WatchdogTest : public ::testing::Test {
 protected:
  void SetUp() override { set_watchdog_file(path_); }
  void TearDown() override {
    set_watchdog_file("");
    std::remove(path_.c_str());
  }
  [[nodiscard]] json report() const {
    std::ifstream file(path_);
    return json::parse(file, nullptr, false);
  }

  // Of its own for each test: of several failures the first stays.
  const std::string path_ = ::testing::TempDir() + "watchdog_" + std::to_string(::getpid()) + "_" +
                            ::testing::UnitTest::GetInstance()->current_test_info()->name() + ".json";
};

constexpr std::int64_t kSize = 64;
constexpr std::int64_t kTile = 16;

/// Rank 1 stays away from transfer 1 until the others have given up.
void run_with_a_late_rank(const std::shared_ptr<Communicator>& communicator, std::latch& others) {
  ContextOptions options;
  options.num_threads = 1;
  if (communicator->rank() == 1) {
    options.hooks.before_transfer = [&](std::int64_t transfer) {
      if (transfer == 1) others.wait();
    };
  }
  struct CountDown {
    std::latch* latch;
    ~CountDown() {
      if (latch != nullptr) latch->count_down();
    }
  } const done{communicator->rank() == 1 ? nullptr : &others};
  Context context(communicator, options);
  GemmAllReduce op(
      context, {.m = kSize, .n = kSize, .k = 8, .tile_m = kTile, .tile_n = kTile, .partition = {4, 8, 4}});
  const std::vector<float> a(kSize * 8, 1.0F);
  std::vector<float> out(kSize * kSize);
  Operands operands;
  operands.a = operands.b = a.data();
  operands.lda = operands.ldb = 8;
  operands.out = out.data();
  operands.ldo = kSize;
  op(operands);
}

TEST_F(WatchdogTest, SaysWhereEachRankIsAndHowFarItsPlanHasCome) {
  std::latch others(2);
  EXPECT_THROW(run_ranks(3, {{}, milliseconds{400}},
                         [&](std::shared_ptr<Communicator> communicator) {
                           run_with_a_late_rank(communicator, others);
                         }),
               Error);
  const json written = report();
  ASSERT_TRUE(written.is_object());
  EXPECT_NE(written.at("error").get<std::string>().find("rank 1 did not arrive"), std::string::npos);
  EXPECT_EQ(written.at("process"), ::getpid());
  for (const char* name : {"flashoverlap", "host", "time"}) EXPECT_NE(written.at(name), "") << name;

  const json& world = written.at("communicators").at(0);
  EXPECT_EQ(world.at("kind"), "in-process");
  EXPECT_EQ(world.at("world_size"), 3);
  const json& ranks = world.at("ranks");
  ASSERT_EQ(ranks.size(), 3U);
  EXPECT_EQ(ranks[1].at("pending").size(), 0U);
  EXPECT_NE(ranks[1].at("last_call_reached").get<std::string>().find("group 0, transfer 0"),
            std::string::npos);
  int waiting = 0;
  for (const std::size_t rank : {0U, 2U}) {
    EXPECT_EQ(ranks[rank].at("finished"), false);
    for (const json& call : ranks[rank].at("pending")) {
      ++waiting;
      EXPECT_EQ(call.at("operation"), "gemm-all-reduce m=64 n=64 k=8 f32");
      EXPECT_EQ(call.at("group"), 1);
      EXPECT_EQ(call.at("transfer"), 1);
      EXPECT_EQ(call.at("missing_ranks"), json::array({1}));
    }
  }
  EXPECT_GE(waiting, 1);  // The other may be on its way there on a busy machine.

  const json& runs = written.at("runs");
  ASSERT_EQ(runs.size(), 3U);
  for (const json& run : runs) {
    EXPECT_EQ(run.at("operation"), "gemm-all-reduce m=64 n=64 k=8 f32");
    EXPECT_EQ(run.at("positions"), 16);
    ASSERT_EQ(run.at("groups").size(), 3U);
    EXPECT_EQ(run.at("groups")[1].at("tiles"), 8);
    EXPECT_LE(run.at("groups")[1].at("tiles_done"), 8);
  }
}

TEST_F(WatchdogTest, TheFirstFailureStays) {
  for (const char* reason : {"first", "second"}) {
    const auto communicators = make_in_process_communicators(2);
    communicators[0]->abort(reason);
    EXPECT_EQ(report().at("error"), "rank 0 aborted: first");
  }
}

TEST_F(WatchdogTest, NoReportOfWhatEndsWell) {
  run_ranks(2, {}, [](std::shared_ptr<Communicator> communicator) { communicator->exchange("", {}); });
  EXPECT_FALSE(std::ifstream(path_).good());
}

}  // namespace
}  // namespace flashoverlap::test

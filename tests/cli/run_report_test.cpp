#include "run_report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

namespace flashoverlap::cli {
namespace {

RunResult some_result() {
  RunResult result;
  PlanOptions plan;
  plan.m = plan.n = plan.k = 64;
  plan.tile_m = plan.tile_n = 32;
  result.plans = {plan_all_reduce(plan)};
  result.times = {.gemm_us = 100, .communication_us = 80, .serial_us = 200, .overlap_us = 120};
  result.check = {.max_error = 1e-6, .tolerance = 1e-4, .elements = 10, .wrong = {}};
  return result;
}

TEST(RunReport, GainIsWhatTheDocumentationSays) {
  const Gain gain = gain_of({.gemm_us = 100, .communication_us = 80, .serial_us = 200, .overlap_us = 120});
  EXPECT_DOUBLE_EQ(gain.bound_us, 100);
  EXPECT_DOUBLE_EQ(gain.speedup, 200.0 / 120);
  EXPECT_DOUBLE_EQ(gain.share, 0.8);
  EXPECT_TRUE(
      std::isnan(gain_of({.gemm_us = 100, .communication_us = 0, .serial_us = 99, .overlap_us = 99}).share));
}

TEST(RunReport, ACorrectResultEndsWith0) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  EXPECT_EQ(print_run({}, some_result(), true), 0);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(nlohmann::json::parse(testing::internal::GetCapturedStdout()).at("correct"), true);
}

TEST(RunReport, AWrongResultEndsWith1AndSaysWhere) {
  RunResult result = some_result();
  result.check.max_error = std::nan("");
  result.check.wrong = "rank 1, element [2, 3] is nan; expected 4 within 0.1";
  for (const bool json : {false, true}) {
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    EXPECT_EQ(print_run({}, result, json), 1);
    EXPECT_EQ(testing::internal::GetCapturedStderr(),
              "flashoverlap: wrong result: " + result.check.wrong + "\n");
    const std::string out = testing::internal::GetCapturedStdout();
    if (json) {
      EXPECT_EQ(nlohmann::json::parse(out).at("correct"), false);
      EXPECT_TRUE(nlohmann::json::parse(out).at("max_error").is_null());
    } else {
      EXPECT_NE(out.find("WRONG: rank 1, element [2, 3]"), std::string::npos) << out;
    }
  }
}

}  // namespace
}  // namespace flashoverlap::cli

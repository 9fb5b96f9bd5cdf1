#include "command_line.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "random_line.h"
#include "support/seed.h"

// What fuzz_test.cpp does with processes, with many more lines in this one: each is carried out, or refused
// in one line with exit code 2.
namespace flashoverlap::test {
namespace {

struct Result {
  int exit_code = 0;
  std::string out;
  std::string err;
};

Result run(const std::vector<std::string>& line) {
  std::vector<std::string> words{"flashoverlap"};
  words.insert(words.end(), line.begin(), line.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  Result result;
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  result.exit_code = cli::run_command_line(static_cast<int>(words.size()), argv.data());
  result.out = ::testing::internal::GetCapturedStdout();
  result.err = ::testing::internal::GetCapturedStderr();
  return result;
}

using CommandLineFuzz = SeededTest;

TEST_F(CommandLineFuzz, AThousandLinesAreCarriedOutOrRefused) {
  // Tuning results of whoever runs this would be used, and warned of.
  ::setenv("XDG_CACHE_HOME", "/nonexistent", 1);
  constexpr int kLines = 1000;
  int accepted = 0;
  RandomLines lines(rng_);
  for (int i = 0; i < kLines; ++i) {
    const RandomLines::Line line = lines.next();
    const Result result = run(line);
    SCOPED_TRACE(RandomLines::text_of(line) + result.err);
    if (result.exit_code == 0) {
      ++accepted;
      EXPECT_TRUE(RandomLines::is_silent_or_warns(result.err));
      EXPECT_NE(result.out, "");
      const bool is_json =
          std::find(line.begin(), line.end(), "--json") != line.end() && result.out[0] == '{';
      EXPECT_TRUE(!is_json || nlohmann::json::accept(result.out)) << result.out;
    } else {
      EXPECT_EQ(result.exit_code, 2);
      EXPECT_EQ(result.out, "");
      EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
      EXPECT_EQ(result.err.find("flashoverlap: "), 0U);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(accepted, kLines / 5);
  EXPECT_LT(accepted, kLines * 4 / 5);
}

}  // namespace
}  // namespace flashoverlap::test

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "process.h"
#include "random_line.h"
#include "support/seed.h"

// Random command lines and environments: whatever they say, the command ends with 0 or 2, and a refusal is
// one line. Many more lines in one process: command_line_test.cpp. Many more environments:
// tests/comm/launcher_test.cpp.
namespace flashoverlap {
namespace {

using test::RandomLines;

// Tuning results of whoever runs this would be used, and warned of.
const std::map<std::string, std::string> kNoCache{{"XDG_CACHE_HOME", "/nonexistent"}};

void expect_well_or_refused(const test::ProcessResult& result, const std::string& shown) {
  SCOPED_TRACE(shown + result.err);
  ASSERT_TRUE(result.exit_code == 0 || result.exit_code == 2) << result.exit_code;
  if (result.exit_code == 0) {
    EXPECT_TRUE(RandomLines::is_silent_or_warns(result.err));
    EXPECT_NE(result.out, "");
  } else {
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
    EXPECT_EQ(result.err.find("flashoverlap: "), 0U);
  }
}

using CommandFuzz = test::SeededTest;

TEST_F(CommandFuzz, AnyLineEndsWellOrIsRefused) {
#ifdef FLASHOVERLAP_SANITIZED
  constexpr int kLines = 100;  // Each starts a process, which takes a sanitizer half a second.
#else
  constexpr int kLines = 300;
#endif
  int accepted = 0;
  RandomLines lines(rng_);
  for (int i = 0; i < kLines; ++i) {
    const RandomLines::Line line = lines.next();
    const test::ProcessResult result = test::run_command(line, {.environment = kNoCache});
    expect_well_or_refused(result, RandomLines::text_of(line));
    if (HasFatalFailure()) return;
    accepted += result.exit_code == 0 ? 1 : 0;
  }
  // Both outcomes are there, or the lines test nothing.
  EXPECT_GT(accepted, kLines / 10);
  EXPECT_LT(accepted, kLines * 9 / 10);
}

// An environment of a launcher that did not start this process, or of half a launcher, among them.
TEST_F(CommandFuzz, AnyEnvironmentEndsWellOrIsRefused) {
  std::vector<std::string> names = {"FLASHOVERLAP_TIMEOUT_MS",
                                    "FLASHOVERLAP_RANK",
                                    "FLASHOVERLAP_WORLD_SIZE",
                                    "FLASHOVERLAP_LOCAL_RANK",
                                    "FLASHOVERLAP_RENDEZVOUS",
                                    "OMPI_COMM_WORLD_RANK",
                                    "OMPI_COMM_WORLD_SIZE",
                                    "PMI_RANK",
                                    "PMI_SIZE",
                                    "MPI_LOCALRANKID",
                                    "RANK",
                                    "WORLD_SIZE",
                                    "LOCAL_RANK",
                                    "MASTER_ADDR",
                                    "MASTER_PORT",
                                    "OMPI_COMM_WORLD_LOCAL_RANK"};
#ifdef FLASHOVERLAP_SANITIZED
  std::erase_if(
      names, [](const std::string& name) { return name.starts_with("OMPI_") || name.starts_with("PMI_"); });
#endif
  const std::vector<std::string> values = {"0",     "0", "0",   "1",  "1",   "4",
                                           "30000", "",  "abc", "-1", "1e3", " 4 "};
  const std::vector<std::string> line = {"run", "-m",           "16", "-n",        "8", "-k",
                                         "4",   "--iterations", "1",  "--threads", "1"};
  constexpr int kEnvironments = 100;
  int accepted = 0;
  for (int i = 0; i < kEnvironments; ++i) {
    test::ProcessOptions options{.environment = kNoCache};
    std::string shown;
    for (const std::string& name : names) {
      if (pick(0, 5) > 0) continue;
      std::string value = values[static_cast<std::size_t>(pick(0, std::ssize(values) - 1))];
      // A time-out of a few milliseconds is accepted, and may well pass: then the command rightly ends
      // with 1.
      if (name == "FLASHOVERLAP_TIMEOUT_MS" && (value == "1" || value == "4")) value = "30000";
      options.environment[name] = value;
      shown += name + "='" + value + "' ";
    }
    const test::ProcessResult result = test::run_command(line, options);
    expect_well_or_refused(result, shown);
    if (HasFatalFailure()) return;
    accepted += result.exit_code == 0 ? 1 : 0;
  }
  EXPECT_GT(accepted, kEnvironments / 10);
  EXPECT_LT(accepted, kEnvironments * 9 / 10);
}

}  // namespace
}  // namespace flashoverlap

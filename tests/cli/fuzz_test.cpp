#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "process.h"
#include "support/seed.h"

// Random command lines: whatever they say, the command ends with 0 or 2, and a refusal is one line.
namespace flashoverlap {
namespace {

struct Option {
  const char* name;
  std::vector<const char*> good;
};

const std::vector<Option>& options() {
  static const std::vector<Option> all{
      {"-m", {"0", "1", "7", "33", "64"}},
      {"--n", {"0", "1", "5", "32", "65"}},
      {"-k", {"0", "1", "3", "16", "40"}},
      {"--ranks", {"1", "2", "3", "4"}},
      {"--threads", {"auto", "1", "2"}},
      {"--dtype", {"f32", "bf16", "f16"}},
      {"--tile-m", {"auto", "1", "8", "64"}},
      {"--tile-n", {"auto", "3", "16", "1000000"}},
      {"--swizzle", {"auto", "1", "2", "7"}},
      {"--partition", {"auto", "1", "1,1", "2,1,1"}},
      {"--rows", {"contiguous", "block-cyclic"}},
      {"--skew", {"0", "0.3", "1"}},
      {"--rows-to-rank", {"3,4", "0,0", "1,2,3", "9"}},
      {"--seed", {"0", "18446744073709551615"}},
      {"--iterations", {"1", "2"}},
      {"--link-gbps", {"auto", "0", "5"}},
      {"--link-latency-us", {"0", "3.5"}},
      {"--rank", {"0", "1"}},
  };
  return all;
}

constexpr std::array kBadValues{"",     "-1",       "x",   "1,", "nan", "1e99", "99999999999999999999",
                                "f16 ", "\xFF\xFE", "--m", "-",  "--",  "%s%n", "0x1",
                                ",",    "auto,auto"};

class CommandFuzz : public test::SeededTest {
 protected:
  template <typename Values>
  std::string one_of(const Values& values) {
    return values[static_cast<std::size_t>(pick(0, static_cast<std::int64_t>(values.size()) - 1))];
  }

  std::vector<std::string> random_line() {
    constexpr std::array kCommands{"run", "run", "run", "plan", "plan", "doctor", "--version", "nonsense"};
    constexpr std::array kOps{"gemm-all-reduce", "gemm-reduce-scatter", "gemm-all-to-all", "gemm-nothing"};
    std::vector<std::string> line{one_of(kCommands)};
    if (pick(0, 3) > 0) line.push_back(one_of(kOps));
    const bool may_be_bad = pick(0, 1) == 0;
    for (const Option& option : options()) {
      // m, n and k, the first three, always: the shape by default takes too long for this.
      const bool is_shape = &option - options().data() < 3;
      if (!is_shape && pick(0, 4) > 0) continue;
      line.emplace_back(option.name);
      line.push_back(may_be_bad && pick(0, 5) == 0 ? one_of(kBadValues) : one_of(option.good));
    }
    if (pick(0, 2) == 0) line.emplace_back("--json");
    if (may_be_bad && pick(0, 5) == 0) line.push_back(one_of(kBadValues));
    if (may_be_bad && pick(0, 5) == 0) std::shuffle(line.begin(), line.end(), rng_);
    return line;
  }
};

TEST_F(CommandFuzz, AnyLineEndsWellOrIsRefused) {
  constexpr int kLines = 300;
  int accepted = 0;
  for (int i = 0; i < kLines; ++i) {
    const std::vector<std::string> line = random_line();
    std::string shown;
    for (const std::string& word : line) shown += "'" + word + "' ";
    const test::ProcessResult result = test::run_command(line);
    ASSERT_TRUE(result.exit_code == 0 || result.exit_code == 2)
        << result.exit_code << ": " << shown << result.err;
    if (result.exit_code == 0) {
      ++accepted;
      EXPECT_EQ(result.err, "") << shown;
      EXPECT_NE(result.out, "") << shown;
    } else {
      EXPECT_EQ(result.out, "") << shown;
      EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << shown << result.err;
      EXPECT_EQ(result.err.find("flashoverlap: "), 0U) << shown << result.err;
    }
  }
  // Both outcomes are there, or the lines test nothing.
  EXPECT_GT(accepted, kLines / 10);
  EXPECT_LT(accepted, kLines * 9 / 10);
}

}  // namespace
}  // namespace flashoverlap

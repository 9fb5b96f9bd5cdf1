#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

/// Command lines of `flashoverlap`, right and wrong ones, none of which takes long.
namespace flashoverlap::test {

struct LineOption {
  const char* name;
  std::vector<const char*> good;  // Empty: it has no value.
  std::vector<std::string> commands;
  bool is_needed = false;  // Without it a right line would take too long, or be refused.
  bool is_rare = false;    // With most of the other options it is refused.
};

class RandomLines {
 public:
  using Line = std::vector<std::string>;

  explicit RandomLines(std::mt19937_64& rng) : rng_(rng) {}

  Line next() {
    const std::string command = one_of(kCommands);
    Line line{command};
    const bool may_be_bad = pick(0, 1) == 0;
    if (pick(0, 3) > 0) line.push_back(one_of(kOperators));
    for (const LineOption& option : kOptions) {
      const bool belongs =
          std::find(option.commands.begin(), option.commands.end(), command) != option.commands.end();
      if (!belongs && !(may_be_bad && pick(0, 60) == 0)) continue;
      if (belongs && !option.is_needed && pick(0, option.is_rare ? 30 : 4) > 0) continue;
      line.emplace_back(option.name);
      if (option.good.empty()) continue;
      line.push_back(may_be_bad && pick(0, 8) == 0 ? one_of(kBadValues) : one_of(option.good));
    }
    if (may_be_bad && pick(0, 5) == 0) line.push_back(one_of(kBadValues));
    if (may_be_bad && pick(0, 5) == 0) std::shuffle(line.begin(), line.end(), rng_);
    return line;
  }

  /// Nothing, or warnings (a machine profile without the type, …).
  static bool is_silent_or_warns(const std::string& text) {
    for (std::size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1) {
      if (text.compare(begin, kWarning.size(), kWarning) != 0) return false;
    }
    return true;
  }

  static std::string text_of(const Line& line) {
    std::string text;
    for (const std::string& word : line) text += "'" + word + "' ";
    return text;
  }

 private:
  static constexpr std::string_view kWarning = "flashoverlap: warning: ";

  std::int64_t pick(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng_);
  }
  template <typename Values>
  std::string one_of(const Values& values) {
    return values[static_cast<std::size_t>(pick(0, static_cast<std::int64_t>(values.size()) - 1))];
  }

  static inline const std::vector<std::string> kCommands = {
      "run", "run", "run", "plan", "plan", "tune", "simulate", "doctor", "--help", "nonsense"};
  static inline const std::vector<std::string> kOperators = {
      "gemm-all-reduce",     "gemm-reduce-scatter", "gemm-all-to-all", "gemm-all-reduce",
      "gemm-reduce-scatter", "gemm-all-to-all",     "gemm-nothing"};
  static inline const std::vector<std::string> kBadValues = {
      "",     "-1",       "x",  "1,",   "nan", "1e99", "99999999999999999999",
      "f16 ", "\xFF\xFE", "-",  "%s%n", "0x1", ",",    "auto,auto",
      "--m",  "--",       "\n", "2:"};
  static inline const std::vector<std::string> kAll = {"run", "plan", "tune", "simulate"};
  static inline const std::vector<LineOption> kOptions = {
      {"-m", {"0", "1", "7", "33", "64"}, kAll, true},
      {"--n", {"0", "1", "5", "32", "65"}, kAll, true},
      {"-k", {"0", "1", "3", "16", "40"}, kAll, true},
      {"--machine", {"8x-a800-nvlink", "4x-rtx4090-pcie"}, {"tune", "simulate"}, true},
      {"--no-cache", {}, {"run", "tune"}},
      {"--ranks", {"1", "2", "3", "4"}, kAll},
      {"--threads", {"auto", "1", "2"}, kAll},
      {"--dtype", {"f32", "bf16", "f16"}, kAll},
      {"--tile-m", {"auto", "1", "8", "64"}, kAll},
      {"--tile-n", {"auto", "3", "16", "1000000"}, kAll},
      {"--swizzle", {"auto", "1", "2", "7"}, kAll},
      {"--partition", {"auto", "1", "1,1", "2,1,1"}, {"run", "plan"}, false, true},
      {"--rows", {"contiguous", "block-cyclic"}, {"run", "plan"}, false, true},
      {"--skew", {"0", "0.3", "1"}, {"run", "plan"}, false, true},
      {"--rows-to-rank", {"3,4", "0,0", "1,2,3", "9"}, {"run", "plan"}, false, true},
      {"--seed", {"0", "18446744073709551615"}, kAll},
      {"--iterations", {"1", "2"}, {"run"}},
      {"--link-gbps", {"auto", "0", "5"}, {"run"}},
      {"--link-latency-us", {"0", "3.5"}, {"run"}},
      {"--backend", {"cpu"}, {"run"}},
      {"--rank", {"0", "1"}, {"plan"}},
      {"--load", {"/nonexistent.json", "/dev/null"}, {"plan"}, false, true},
      {"--jitter", {"0", "0.1"}, {"simulate"}},
      {"--slow", {"0:2", "1:1.5,0:3", "9:1"}, {"simulate"}, false, true},
      {"--sweep", {"m=8,16", "ranks=1,2", "units=", "colour=1"}, {"simulate"}, false, true},
      {"--csv", {"/nonexistent/a.csv"}, {"simulate"}, false, true},
      {"--trace", {"/nonexistent/a.json"}, {"run", "simulate"}, false, true},
      {"--json", {}, {"run", "plan", "tune", "simulate", "doctor"}}};

  std::mt19937_64& rng_;
};

}  // namespace flashoverlap::test

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "commands.h"
#include "files.h"
#include "option_values.h"
#include "profile_measure.h"
#include "tuning_options.h"

namespace flashoverlap::cli {
namespace {

struct ProfileCommand {
  ProfileOptions profile;
  ProblemOptions problem;  ///< Ranks and threads only.
  std::string dtypes = "f32";
  std::string output;
};

/// A bar on a terminal, one line per tenth elsewhere; on stderr, so that it never mixes with results.
class ProgressBar {
 public:
  void show(std::int64_t done, std::int64_t total, const std::string& next) {
    constexpr int kWidth = 30;
    const auto filled = static_cast<std::size_t>(done * kWidth / total);
    if (::isatty(STDERR_FILENO) != 0) {
      fmt::print(stderr, "\r[{:<{}}] {:3}% {:<40}", std::string(filled, '#'), kWidth, done * 100 / total,
                 next);
      if (done == total) fmt::print(stderr, "\n");
    } else if (done * 10 / total != last_tenth_) {
      last_tenth_ = done * 10 / total;
      fmt::print(stderr, "{}% done, next: {}\n", done * 100 / total, next);
    }
    std::fflush(stderr);
  }

 private:
  std::int64_t last_tenth_ = -1;
};

std::vector<DType> parse_dtypes(const std::string& text) {
  std::vector<DType> dtypes;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string name = text.substr(begin, end - begin);
    require_choice("--dtypes", name, {"f32", "bf16", "f16"});
    dtypes.push_back(parse_dtype(name));
    begin = end + 1;
  }
  return dtypes;
}

std::string summary(const MachineProfile& profile, const std::string& path) {
  std::string text = fmt::format("{}: {}\n", profile.name, profile.description);
  for (const GemmKernel& kernel : profile.gemm.kernels) {
    text += fmt::format("  GEMM {} {}x{}: {:.1f} GFLOP/s per thread and {:.1f} us per tile\n",
                        name_of(kernel.dtype), kernel.tile_m, kernel.tile_n, kernel.unit_gflops,
                        kernel.overhead_us);
  }
  for (const CommunicationCurve& curve : profile.curves) {
    const CurvePoint& large = curve.curve.points().back();
    text += fmt::format("  {}: {:.1f} us for {:.0f} bytes, {:.2f} GB/s for {:.0f} bytes\n",
                        name_of(curve.collective), curve.curve.points().front().time_us,
                        curve.curve.points().front().bytes, large.bytes / large.time_us / 1e3, large.bytes);
  }
  text += fmt::format(
      "  launch {:.1f} us, signal {:.1f} us, restore {:.1f} us/MiB, computing time lost {:.1f} us/MiB\n",
      profile.gemm.launch_us, profile.signal_us, profile.restore_us_per_mib, profile.steal_us_per_mib);
  return text + fmt::format("Written to {}\n", path);
}

int profile(ProfileCommand& command) {
  command.profile.dtypes = parse_dtypes(command.dtypes);
  command.profile.ranks = command.problem.ranks;
  command.profile.threads = threads_per_rank(command.problem.threads, command.problem.ranks);
  std::string path = command.output;
  if (path.empty()) {
    path = default_profile_path(command.profile.ranks, command.profile.threads);
    if (path.empty()) {
      throw CLI::ValidationError("--output",
                                 "is needed: neither XDG_CACHE_HOME nor HOME names a place for it");
    }
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  }
  require_writable("--output", path);
  ProgressBar bar;
  const MachineProfile measured = measure_profile(
      command.profile,
      [&](std::int64_t done, std::int64_t total, const std::string& next) { bar.show(done, total, next); });
  const std::string json = to_json(measured);
  write_file("--output", path, [&](std::ostream& out) { out << json; });
  fmt::print("{}", summary(measured, path));
  return kExitSuccess;
}

}  // namespace

void add_profile_command(CLI::App& app, Action& action) {
  CLI::App* sub = app.add_subcommand(
      "profile",
      "Measure this machine: tiles, collectives and what they cost each other; for tune and simulate");
  const auto command = std::make_shared<ProfileCommand>();
  sub->add_option(
         "-o,--output", command->output,
         "Where the profile goes; default: where run and tune look for it,\nnext to the tuning cache")
      ->type_name("FILE");
  constexpr IntegerRange kCounts{1, 1024};
  constexpr IntegerRange kRepetitions{1, 1000};
  add_integer(*sub, "--ranks", command->problem.ranks, kCounts, "Ranks, each a thread of this process")
      ->default_str(std::to_string(command->problem.ranks));
  add_integer_or_auto(*sub, "--threads", command->problem.threads, kCounts,
                      "Compute threads of each rank; auto: cores / ranks")
      ->default_str("auto");
  add_integer(*sub, "--repetitions", command->profile.repetitions, kRepetitions,
              "Of each measurement; medians are kept")
      ->default_str(std::to_string(command->profile.repetitions));
  sub->add_option("--dtypes", command->dtypes, "Element types to measure, of f32, bf16, f16")
      ->type_name("LIST")
      ->default_str("f32");
  sub->footer("\nExample: flashoverlap profile --ranks 2 -o machine.json");
  sub->callback([command, &action] { action = [command] { return profile(*command); }; });
}

}  // namespace flashoverlap::cli

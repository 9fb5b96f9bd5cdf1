#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "commands.h"
#include "files.h"
#include "gpu_machine.h"
#include "gpu_options.h"
#include "option_values.h"
#include "profile_measure.h"
#include "tuning_options.h"

namespace flashoverlap::cli {
namespace {

struct ProfileCommand {
  ProfileOptions profile;
  ProblemOptions problem;  ///< Ranks and threads only.
  GpuOptions gpu;
  std::string dtypes;  ///< Empty: f32, and bf16 on GPUs.
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

/// `unit`: what the machine's units are called.
std::string summary(const MachineProfile& profile, const std::string& unit, const std::string& path) {
  std::string text = fmt::format("{}: {}\n", profile.name, profile.description);
  for (const GemmKernel& kernel : profile.gemm.kernels) {
    const std::string units =
        kernel.units_per_tile == 1 ? unit : fmt::format("{} {}s", kernel.units_per_tile, unit);
    text +=
        fmt::format("  GEMM {} {}x{}: {:.1f} GFLOP/s per {} and {:.1f} us per tile\n", name_of(kernel.dtype),
                    kernel.tile_m, kernel.tile_n, kernel.unit_gflops, units, kernel.overhead_us);
  }
  for (const CommunicationCurve& curve : profile.curves) {
    const CurvePoint& large = curve.curve.points().back();
    const std::string beside = curve.units == 0 ? "" : fmt::format(" on {} {}s", curve.units, unit);
    text += fmt::format("  {}{}: {:.1f} us for {:.0f} bytes, {:.2f} GB/s for {:.0f} bytes\n",
                        name_of(curve.collective), beside, curve.curve.points().front().time_us,
                        curve.curve.points().front().bytes, large.bytes / large.time_us / 1e3, large.bytes);
  }
  text += fmt::format(
      "  launch {:.1f} us, signal {:.1f} us, restore {:.1f} us/MiB, computing time lost {:.1f} us/MiB\n",
      profile.gemm.launch_us, profile.signal_us, profile.restore_us_per_mib, profile.steal_us_per_mib);
  return text + fmt::format("Written to {}\n", path);
}

/// Where run and tune look for it.
std::string default_path(const ProfileCommand& command) {
  const ProfileOptions& profile = command.profile;
  std::string path = command.gpu.on_gpus() ? default_gpu_profile_path(profile.ranks, command.gpu,
                                                                      gpu_machine(profile.ranks, command.gpu))
                                           : default_profile_path(profile.ranks, profile.threads);
  if (path.empty()) {
    throw CLI::ValidationError("--output", "is needed: neither XDG_CACHE_HOME nor HOME names a place for it");
  }
  return path;
}

int profile(ProfileCommand& command) {
  check_gpu_options(command.gpu);
  if (command.gpu.nccl_buffers != GpuOptions{}.nccl_buffers) {
    throw CLI::ValidationError("--nccl-buffers", "is for run and tune; curves are of plain buffers");
  }
  const bool on_gpus = command.gpu.on_gpus();
  if (command.dtypes.empty()) command.dtypes = on_gpus ? "bf16" : "f32";
  command.profile.dtypes = parse_dtypes(command.dtypes);
  command.profile.ranks = command.problem.ranks;
  command.profile.threads = threads_per_rank(command.problem.threads, command.problem.ranks);
  std::string path = command.output;
  if (path.empty()) {
    path = default_path(command);
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  }
  require_writable("--output", path);
  ProgressBar bar;
  const Progress show = [&](std::int64_t done, std::int64_t total, const std::string& next) {
    bar.show(done, total, next);
  };
  const MachineProfile measured = on_gpus ? measure_gpu_profile(command.profile, command.gpu, show)
                                          : measure_profile(command.profile, show);
  const std::string json = to_json(measured);
  write_file("--output", path, [&](std::ostream& out) { out << json; });
  fmt::print("{}", summary(measured, on_gpus ? "SM" : "thread", path));
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
  sub->add_option("--dtypes", command->dtypes,
                  "Element types to measure, of f32, bf16, f16; when not given: f32, and bf16\n"
                  "with --backend cuda")
      ->type_name("LIST");
  add_gpu_options(*sub, std::shared_ptr<GpuOptions>(command, &command->gpu), SmsOption::kSeveral,
                  "numbers of SMs of each device to measure communication on;\n"
                  "GEMMs have what the first one leaves. When not given: 24,16,8, and 0,2 with\n"
                  "--comm copy-engine");
  sub->footer(
      "\nExamples: flashoverlap profile --ranks 2 -o machine.json\n"
      "          flashoverlap profile --backend cuda --ranks 4 --devices 0,1,2,3");
  sub->callback([command, &action] { action = [command] { return profile(*command); }; });
}

}  // namespace flashoverlap::cli

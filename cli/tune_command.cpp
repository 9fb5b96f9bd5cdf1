#include <fmt/format.h>

#include <cstdio>
#include <ctime>
#include <memory>
#include <optional>

#include "commands.h"
#include "core/fail.h"
#include "format.h"
#include "gpu_run.h"
#include "option_values.h"
#include "profile_measure.h"
#include "run_measure.h"
#include "tune_request.h"
#include "tuning_options.h"

namespace flashoverlap::cli {
namespace {

struct TuneCommand {
  ProblemOptions problem;
  TuningOptions tuning;
  GpuOptions gpu;
  LinkModel link;
  std::optional<std::int64_t>
      measured;  ///< Candidates to run; not given: none on CPUs, kMeasuredOnGpus there.
  std::int64_t iterations = 5;
  bool json = false;
};

// Beside a GEMM NCCL is slower than alone, which profiles do not know: the predictor's order is not the last
// word.
constexpr std::int64_t kMeasuredOnGpus = 4;

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

std::int64_t threads_of(const ProblemOptions& problem) {
  return threads_per_rank(problem.threads, problem.ranks);
}

/// What is tuned for: this machine's CPUs or GPUs, or the machine of a profile.
struct Target {
  bool is_named = false;  ///< By --machine: the results are of no use here.
  std::optional<GpuMachine> gpus;
  std::int64_t units = 0;    ///< Of one rank, as the cache has them.
  std::string communicator;  ///< The same.
  MachineIdentity identity;
};

Target target_of(const TuneCommand& command) {
  Target target;
  target.is_named = !command.tuning.machine.empty();
  if (target.is_named) return target;
  if (!command.gpu.on_gpus()) {
    target.units = threads_of(command.problem);
    target.communicator = communicator_name(command.link);
    target.identity = this_machine();
    return target;
  }
  target.gpus = gpu_machine(command.problem.ranks, command.gpu);
  target.units = target.gpus->units;
  target.communicator = communicator_name(command.link, command.gpu.communicator_text());
  target.identity = target.gpus->identity;
  return target;
}

/// The profile that the options name; without one, and without one of this machine, this machine is measured
/// now.
MachineProfile machine_for(const TuneCommand& command, const Target& target) {
  const ProblemOptions& problem = command.problem;
  const std::optional<MachineProfile> found =
      target.gpus ? find_gpu_machine(command.tuning, problem.ranks, command.gpu, *target.gpus)
                  : find_machine(command.tuning, problem.ranks, threads_of(problem));
  if (found) return *found;
  fmt::print(stderr, "No profile of this machine yet: measuring it (flashoverlap profile keeps one).\n");
  const ProfileOptions profile{
      .ranks = problem.ranks, .threads = threads_of(problem), .dtypes = {problem.dtype}, .repetitions = 5};
  const auto silent = [](std::int64_t, std::int64_t, const std::string&) {};
  return target.gpus ? measure_gpu_profile(profile, command.gpu, silent) : measure_profile(profile, silent);
}

/// Candidates as the options and the target leave them.
TuneRequest request_for(const TuneCommand& command, const MachineProfile& machine, const Target& target) {
  TuneRequest request = tune_request(command.problem, machine, target.units);
  if (!target.gpus) {
    request.communication_units = command.gpu.communication_sms;  // with --machine
    return request;
  }
  // Ranks that share a device share its communication SMs, too.
  request.communication_units =
      target.gpus->shares_devices ? std::vector{target.gpus->max_ctas} : command.gpu.communication_sms;
  if (request.tiles.empty()) request.tiles = gpu_tiles(command.problem, command.gpu);
  return request;
}

/// `gpu` with the communication SMs of a choice.
GpuOptions with_sms(GpuOptions gpu, const Target& target, const TuneChoice& choice) {
  if (!target.gpus->shares_devices) gpu.communication_sms = {choice.resources.communication_units};
  return gpu;
}

/// The serial and overlapped times of real calls with this choice.
double measure_choice(const TuneCommand& command, const Target& target, const TuneChoice& choice) {
  RunOptions run;
  run.problem = command.problem;
  run.problem.tile_m = choice.tile.tile_m;
  run.problem.tile_n = choice.tile.tile_n;
  run.problem.swizzle = choice.tile.swizzle;
  run.problem.partition = choice.partition;
  run.link_is_auto = false;
  run.link = command.link;
  run.iterations = command.iterations;
  const RunResult result =
      target.gpus ? measure_on_gpus(run, with_sms(command.gpu, target, choice)) : measure(run);
  if (!result.check.correct()) core::fail(ErrorKind::kInternal, "wrong result: {}", result.check.wrong);
  return choice.overlaps() ? result.times.overlap_us : result.times.serial_us;
}

TuningEntry entry_of(const TuneCommand& command, const Target& target, const TuneResult& result) {
  TuningEntry entry;
  entry.key = tuning_key(command.problem, target.units, target.communicator);
  entry.tile_m = result.best.tile.tile_m;
  entry.tile_n = result.best.tile.tile_n;
  entry.swizzle = result.best.tile.swizzle;
  entry.resources = result.best.resources;
  entry.partition = result.best.partition;
  entry.predicted_us = result.best.prediction.total_us;
  entry.serial_us = result.measured_us > 0 ? result.serial_measured_us : result.serial.prediction.total_us;
  entry.measured_us = result.measured_us;
  entry.how = result.measured_us > 0 ? "measured" : "predicted";
  entry.date = today();
  return entry;
}

nlohmann::ordered_json to_json(const TuneResult& result, const MachineProfile& machine,
                               const std::string& stored) {
  const auto choice = [](const TuneChoice& c) {
    return nlohmann::ordered_json{{"tile_m", c.tile.tile_m},
                                  {"tile_n", c.tile.tile_n},
                                  {"swizzle", c.tile.swizzle},
                                  {"compute_units", c.resources.compute_units},
                                  {"communication_units", c.resources.communication_units},
                                  {"partition", c.partition},
                                  {"predicted_us", c.prediction.total_us},
                                  {"compute_us", c.prediction.compute_us},
                                  {"communication_us", c.prediction.communication_us},
                                  {"exposed_us", c.prediction.exposed_us},
                                  {"lower_bound_us", c.lower_bound_us}};
  };
  nlohmann::ordered_json json{{"machine", machine.name},
                              {"chosen", choice(result.best)},
                              {"serial", choice(result.serial)},
                              {"measured_us", result.measured_us},
                              {"serial_measured_us", result.serial_measured_us},
                              {"explanation", explain(result)},
                              {"cache", stored}};
  for (const TuneChoice& candidate : result.candidates) json["candidates"].push_back(choice(candidate));
  return json;
}

void check(const TuneCommand& command) {
  check_gpu_options(command.gpu);
  if (!command.tuning.machine.empty() && command.measured.value_or(0) > 0) {
    throw CLI::ValidationError("--measure", "runs on this machine; leave --machine out, or do not measure");
  }
  const bool is_paced = command.link.bandwidth_gbps > 0 || command.link.latency_us > 0;
  if (command.gpu.on_gpus() && command.gpu.communicator == "nccl" && is_paced) {
    throw CLI::ValidationError("--link-gbps, --link-latency-us",
                               "NCCL cannot be paced; use --comm local or copy-engine");
  }
}

int tune(TuneCommand& command) {
  check(command);
  const Target target = target_of(command);
  const std::int64_t measured = command.measured.value_or(target.gpus ? kMeasuredOnGpus : 0);
  const MachineProfile profile = machine_for(command, target);
  const MachineProfile machine = target.is_named ? profile : paced(profile, command.link);
  TuneResult result = tune_call(request_for(command, machine, target), machine);
  if (measured > 0) {
    measure_best(result, measured,
                 [&](const TuneChoice& choice) { return measure_choice(command, target, choice); });
  }
  std::string stored;
  // Another machine's tuning is of no use here: it is printed, not kept.
  if (const std::string path = cache_path(command.tuning); !path.empty() && !target.is_named) {
    TuningCache cache(path, target.identity, warn);
    cache.store(entry_of(command, target, result));
    stored = path;
  }
  if (command.json) {
    print_json(to_json(result, machine, stored));
    return kExitSuccess;
  }
  fmt::print("{} m={} n={} k={} {}, {} ranks on {}{}\n", name_of(command.problem.op), command.problem.m,
             command.problem.n, command.problem.k, name_of(command.problem.dtype), command.problem.ranks,
             machine.name, target.is_named ? "" : ", " + target.communicator);
  fmt::print("{}", explain(result));
  fmt::print("{}\n",
             stored.empty() ? "Not kept in a cache." : "Kept in " + stored + ": flashoverlap run uses it.");
  return kExitSuccess;
}

}  // namespace

void add_tune_command(CLI::App& app, Action& action) {
  CLI::App* sub = app.add_subcommand(
      "tune", "Choose tile and partition of an operator by prediction, say why, and keep the answer for run");
  const auto command = std::make_shared<TuneCommand>();
  add_problem_options(*sub, std::shared_ptr<ProblemOptions>(command, &command->problem));
  add_gpu_options(*sub, std::shared_ptr<GpuOptions>(command, &command->gpu), SmsOption::kSeveral,
                  "candidates for the SMs of each device that the GEMM leaves\n"
                  "to communication; when not given: those of the machine profile");
  add_machine_option(*sub, command->tuning,
                     "this machine, measured now if flashoverlap profile did not do it before");
  add_cache_options(*sub, command->tuning);
  constexpr double kMax = 1e6;
  add_number(*sub, "--link-gbps", command->link.bandwidth_gbps, 0, kMax,
             "The paced link of run --link-gbps; 0: not paced. Not with --machine")
      ->default_str("0");
  add_number(*sub, "--link-latency-us", command->link.latency_us, 0, kMax,
             "Latency of each transfer of that link")
      ->default_str("0");
  constexpr IntegerRange kMeasured{0, 1000};
  constexpr IntegerRange kIterations{1, 1'000'000};
  sub->add_option_function<std::string>(
         "--measure",
         [command, kMeasured](const std::string& text) {
           command->measured = parse_integer("--measure", text, kMeasured);
         },
         "Run the best so many candidates and the serial method, and take the fastest;\n"
         "when not given: 0, and 4 with --backend cuda")
      ->type_name("INT");
  add_integer(*sub, "--iterations", command->iterations, kIterations, "Measured calls of each candidate")
      ->default_str(std::to_string(command->iterations));
  sub->add_flag("--json", command->json, "Print one JSON object with all candidates");
  sub->footer(
      "\nExamples: flashoverlap tune gemm-all-reduce -m 2048 -n 2048 -k 1024 --link-gbps 0.5 --measure 3\n"
      "          flashoverlap tune gemm-all-reduce -m 8192 -n 8192 -k 2048 --dtype f16 --ranks 8 --machine "
      "8x-a800-nvlink\n"
      "          flashoverlap tune gemm-all-reduce -m 8192 -n 8192 -k 2048 --dtype bf16 --ranks 4 --backend "
      "cuda");
  sub->callback([command, &action] { action = [command] { return tune(*command); }; });
}

}  // namespace flashoverlap::cli

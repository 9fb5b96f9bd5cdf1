#include <fmt/format.h>

#include <cstdio>
#include <ctime>
#include <memory>
#include <optional>

#include "commands.h"
#include "core/fail.h"
#include "format.h"
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
  LinkModel link;
  std::int64_t measured = 0;
  std::int64_t iterations = 5;
  bool json = false;
};

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

std::int64_t threads_of(const ProblemOptions& problem) {
  return threads_per_rank(problem.threads, problem.ranks);
}

/// The profile that the options name; without one, and without one of this machine, this machine is measured
/// now.
MachineProfile machine_for(const TuneCommand& command) {
  if (std::optional<MachineProfile> found =
          find_machine(command.tuning, command.problem.ranks, threads_of(command.problem)))
    return *found;
  fmt::print(stderr, "No profile of this machine yet: measuring it (flashoverlap profile keeps one).\n");
  return measure_profile({.ranks = command.problem.ranks,
                          .threads = threads_of(command.problem),
                          .dtypes = {command.problem.dtype},
                          .repetitions = 5},
                         [](std::int64_t, std::int64_t, const std::string&) {});
}

/// The serial and overlapped times of real calls with this choice.
double measure_choice(const TuneCommand& command, const TuneChoice& choice) {
  RunOptions run;
  run.problem = command.problem;
  run.problem.tile_m = choice.tile.tile_m;
  run.problem.tile_n = choice.tile.tile_n;
  run.problem.swizzle = choice.tile.swizzle;
  run.problem.partition = choice.partition;
  run.link_is_auto = false;
  run.link = command.link;
  run.iterations = command.iterations;
  const RunResult result = measure(run);
  if (!result.check.correct()) core::fail(ErrorKind::kInternal, "wrong result: {}", result.check.wrong);
  return choice.overlaps() ? result.times.overlap_us : result.times.serial_us;
}

TuningEntry entry_of(const TuneCommand& command, const TuneResult& result, const std::string& variant) {
  const ProblemOptions& p = command.problem;
  TuningEntry entry;
  entry.key = {.operation = std::string(name_of(p.op)),
               .m = p.m,
               .n = p.n,
               .k = p.k,
               .dtype = p.dtype,
               .world_size = p.ranks,
               .units = threads_of(p),
               .epilogue = "any",
               .variant = variant,
               .communicator = communicator_name(command.link)};
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

int tune(TuneCommand& command) {
  const bool named = !command.tuning.machine.empty();
  if (named && command.measured > 0) {
    throw CLI::ValidationError("--measure", "runs on this machine; leave --machine out, or do not measure");
  }
  const MachineProfile profile = machine_for(command);
  const MachineProfile machine = named ? profile : paced(profile, command.link);
  const Routing routing = make_routing(command.problem);
  const TuneRequest request = tune_request(command.problem, machine, named ? 0 : threads_of(command.problem));
  TuneResult result = tune_call(request, machine);
  if (command.measured > 0) {
    measure_best(result, command.measured,
                 [&](const TuneChoice& choice) { return measure_choice(command, choice); });
  }
  std::string stored;
  // Another machine's tuning is of no use here: it is printed, not kept.
  if (const std::string path = cache_path(command.tuning); !path.empty() && !named) {
    TuningCache cache(path, this_machine(), warn);
    cache.store(entry_of(command, result, tuning_variant(command.problem)));
    stored = path;
  }
  if (command.json) {
    print_json(to_json(result, machine, stored));
    return kExitSuccess;
  }
  fmt::print("{} m={} n={} k={} {}, {} ranks on {}{}\n", name_of(command.problem.op), command.problem.m,
             command.problem.n, command.problem.k, name_of(command.problem.dtype), command.problem.ranks,
             machine.name, named ? "" : ", " + communicator_name(command.link));
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
  add_integer(*sub, "--measure", command->measured, kMeasured,
              "Run the best so many candidates and the serial method, and take the fastest")
      ->default_str("0");
  add_integer(*sub, "--iterations", command->iterations, kIterations, "Measured calls of each candidate")
      ->default_str(std::to_string(command->iterations));
  sub->add_flag("--json", command->json, "Print one JSON object with all candidates");
  sub->footer(
      "\nExamples: flashoverlap tune gemm-all-reduce -m 2048 -n 2048 -k 1024 --link-gbps 0.5 --measure 3\n"
      "          flashoverlap tune gemm-all-reduce -m 8192 -n 8192 -k 2048 --dtype f16 --ranks 8 --machine "
      "8x-a800-nvlink");
  sub->callback([command, &action] { action = [command] { return tune(*command); }; });
}

}  // namespace flashoverlap::cli

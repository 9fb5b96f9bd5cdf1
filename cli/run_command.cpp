#include <fmt/format.h>

#include <memory>
#include <optional>

#include "commands.h"
#include "files.h"
#include "flashoverlap/watchdog.h"
#include "gpu_run.h"
#include "layer_run.h"
#include "moe_options.h"
#include "option_values.h"
#include "process_ranks.h"
#include "run_measure.h"
#include "run_report.h"
#include "sliced_options.h"
#include "tuning_options.h"

namespace flashoverlap::cli {
namespace {

/// What `--link-latency-us` is when not given and the link is paced: a network's, roughly.
constexpr double kDefaultLatencyUs = 10;

struct RunCommand {
  RunOptions run;
  TuningOptions tuning;
  GpuOptions gpu;
  std::optional<double> latency_us;
  bool json = false;
  std::int64_t processes = 0;  ///< To start; 0: ranks are threads, or the processes that a launcher started.
  std::string trace_path;
};

double parse_bandwidth(const std::string& text) {
  constexpr double kMin = 0.001;
  constexpr double kMax = 1e6;
  try {
    return parse_number("--link-gbps", text, kMin, kMax);
  } catch (const CLI::ValidationError&) {
    throw CLI::ValidationError(
        "--link-gbps",
        fmt::format("'{}' is not accepted; expected auto, 0 or a number from {} to {}", text, kMin, kMax));
  }
}

void add_link_options(CLI::App& app, const std::shared_ptr<RunCommand>& command) {
  app.add_option_function<std::string>(
         "--link-gbps",
         [command](const std::string& text) {
           command->run.link_is_auto = text == "auto";
           command->run.link.bandwidth_gbps = text == "auto" || text == "0" ? 0 : parse_bandwidth(text);
         },
         "Pace each rank's link to so many 1e9 bytes a second; 0: as fast as memory is;\n"
         "auto: such that communication takes about as long as the GEMM\n"
         "(with --method: a slice's 0.9 of its computation)")
      ->type_name("auto|NUMBER")
      ->default_str("auto");
  app.add_option_function<std::string>(
         "--link-latency-us",
         [command](const std::string& text) {
           constexpr double kMax = 1e6;
           command->latency_us = parse_number("--link-latency-us", text, 0, kMax);
         },
         fmt::format("Latency of each transfer; {} when not given, 0 with --link-gbps 0", kDefaultLatencyUs))
      ->type_name("NUMBER");
}

void check_job(const RunCommand& command) {
  check_backend(command.gpu);
  if (!command.run.link_is_auto || command.latency_us) {
    throw CLI::ValidationError("--link-gbps, --link-latency-us",
                               "only ranks in one process can be paced; a job has the network that it has");
  }
}

/// What leaves a tail-free plan open: nothing, or its parts.
std::string default_parts(const SliceOptions& slices) {
  std::string text = slices.parts > 0
                         ? fmt::format("{} part{} a slice, given", slices.parts, slices.parts == 1 ? "" : "s")
                         : "as few parts as leave no tail";
  if (slices.send_channels > 0) text += fmt::format(", {} slices at a time, given", slices.send_channels);
  return text;
}

int run(RunCommand& command) {
  check_gpu_options(command.gpu);
  const bool is_job = command.run.problem.is_job;
  if (command.processes > 0) {
    if (is_job)
      throw CLI::ValidationError("--processes",
                                 "a launcher has started this process as one of several already");
    start_processes(command.processes);
  }
  if (is_job) check_job(command);
  if (!is_job) require_runnable(command.run.problem);
  const bool is_paced = command.run.link_is_auto || command.run.link.bandwidth_gbps > 0;
  command.run.link.latency_us = command.latency_us.value_or(is_paced && !is_job ? kDefaultLatencyUs : 0);
  if (!command.trace_path.empty()) require_writable("--trace", command.trace_path);

  TunedCall choice{.tile = {}, .partition = {}, .origin = ChoiceOrigin::kDefault, .explanation = "given"};
  const bool on_gpus = command.gpu.on_gpus();
  if (command.run.problem.partition.empty() && !on_gpus) {
    command.run.tuner_for = [&](const LinkModel& link, const std::optional<GemmSample>& gemm) {
      const ProblemOptions& problem = command.run.problem;
      // Of slices a profile is needed that knows what a message takes: one GEMM does not say.
      const bool in_slices = problem.method && *problem.method != OverlapMethod::kSignal;
      return make_tuner(command.tuning, problem.ranks, threads_per_rank(problem.threads, problem.ranks), link,
                        in_slices ? std::nullopt : gemm, [&](const TunedCall& tuned) { choice = tuned; });
    };
  }
  if (command.run.problem.partition.empty() && on_gpus) {
    const GpuMachine machine = gpu_machine(command.run.problem.ranks, command.gpu);
    const LinkModel link = command.run.link_is_auto ? LinkModel{} : command.run.link;
    command.run.problem.tuner = make_gpu_tuner(command.tuning, command.run.problem, link, machine,
                                               command.gpu, [&](const TunedCall& tuned) { choice = tuned; });
  }
  RunResult result = on_gpus ? measure_on_gpus(command.run, command.gpu) : measure(command.run);
  result.choice = choice;
  if (result.method == OverlapMethod::kTailFree && choice.explanation == "given") {
    result.choice.explanation = default_parts(command.run.problem.slices);
  }
  if (!is_first_rank()) return result.check.correct() && result.equals_serial ? kExitSuccess : kExitFailure;
  if (!command.trace_path.empty()) {
    write_file("--trace", command.trace_path,
               [&](std::ostream& out) { write_chrome_trace(result.overlap, out); });
  }
  return print_run(command.run, result, command.json);
}

}  // namespace

void add_run_command(CLI::App& app, Action& action) {
  CLI::App* sub =
      app.add_subcommand("run", "Run an operator serially and overlapped, check it, and compare the times");
  const auto command = std::make_shared<RunCommand>();
  add_problem_options(*sub, std::shared_ptr<ProblemOptions>(command, &command->run.problem),
                      MethodOptions::kPresent);
  sub->preparse_callback([command](std::size_t) {
    ProblemOptions& problem = command->run.problem;
    problem.is_job = is_job();
    if (problem.is_job) problem.ranks = job_size();
  });
  constexpr IntegerRange kProcesses{1, 4096};
  add_integer(*sub, "--processes", command->processes, kProcesses,
              "Start so many processes of this command under mpirun, one rank each;\n"
              "the same as mpirun -n NUMBER flashoverlap run …")
      ->excludes("--ranks");
  sub->add_option_function<std::string>(
         "--watchdog", [](const std::string& path) { set_watchdog_file(path); },
         "When a rank fails, write what each rank was doing (docs/operations.md)")
      ->type_name("FILE");
  add_link_options(*sub, command);
  add_gpu_options(*sub, std::shared_ptr<GpuOptions>(command, &command->gpu), SmsOption::kOne,
                  "SMs of each device that the GEMM leaves to communication;\n"
                  "when not given: the tuned number, or 24");
  add_decomposed_option(*sub, std::shared_ptr<GpuOptions>(command, &command->gpu));
  add_machine_option(*sub, command->tuning, "of this machine, where flashoverlap profile made one");
  add_cache_options(*sub, command->tuning);
  constexpr IntegerRange kIterations{1, 1'000'000};
  add_integer(*sub, "--iterations", command->run.iterations, kIterations,
              "Measured calls of each kind; medians are shown")
      ->default_str(std::to_string(command->run.iterations));
  sub->add_flag("--json", command->json, "Print one JSON object instead of the table");
  sub->add_option("--trace", command->trace_path,
                  "Write the last overlapped call as Chrome trace events (ui.perfetto.dev)")
      ->type_name("FILE");
  sub->footer(
      "\nExample: flashoverlap run gemm-reduce-scatter -m 4096 -n 2048 -k 512 --ranks 4 --link-gbps 0.5");
  add_moe_run(*sub, action);
  add_sliced_run(*sub, action);
  add_layer_run(*sub, action);
  sub->callback([sub, command, &action] {
    if (sub->get_subcommands().empty()) action = [command] { return run(*command); };
  });
}

}  // namespace flashoverlap::cli

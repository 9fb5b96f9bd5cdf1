#include <fmt/format.h>

#include <memory>
#include <optional>

#include "commands.h"
#include "files.h"
#include "option_values.h"
#include "run_measure.h"
#include "run_report.h"

namespace flashoverlap::cli {
namespace {

/// What `--link-latency-us` is when not given and the link is paced: a network's, roughly.
constexpr double kDefaultLatencyUs = 10;

struct RunCommand {
  RunOptions run;
  std::optional<double> latency_us;
  bool json = false;
  std::string trace_path;
};

void add_link_options(CLI::App& app, const std::shared_ptr<RunCommand>& command) {
  app.add_option_function<std::string>(
         "--link-gbps",
         [command](const std::string& text) {
           constexpr double kMin = 0.001;
           constexpr double kMax = 1e6;
           command->run.link_is_auto = text == "auto";
           if (text == "auto") return;
           command->run.link.bandwidth_gbps = text == "0" ? 0 : parse_number("--link-gbps", text, kMin, kMax);
         },
         "Pace each rank's link to so many 1e9 bytes a second; 0: as fast as memory is;\n"
         "auto: such that communication takes about as long as the GEMM")
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

int run(RunCommand& command) {
  const bool is_paced = command.run.link_is_auto || command.run.link.bandwidth_gbps > 0;
  command.run.link.latency_us = command.latency_us.value_or(is_paced ? kDefaultLatencyUs : 0);
  if (!command.trace_path.empty()) require_writable("--trace", command.trace_path);

  const RunResult result = measure(command.run);
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
  add_problem_options(*sub, std::shared_ptr<ProblemOptions>(command, &command->run.problem));
  add_link_options(*sub, command);
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
  sub->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace flashoverlap::cli

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>

#include "commands.h"
#include "files.h"
#include "flashoverlap/simulator.h"
#include "format.h"
#include "layer_run.h"
#include "moe_options.h"
#include "option_values.h"
#include "simulate_sweep.h"
#include "sliced_options.h"

namespace flashoverlap::cli {
namespace {

struct SimulateCommand {
  SimulateOptions simulate;
  std::string machine;
  std::string sweep;
  std::string csv_path;
  std::string trace_path;
  std::string slow;
  bool json = false;
};

/// The methods beside each other, with what of the communication shows.
void add_exposed_rows(const ProblemOptions& problem, const SimulatedCall& call,
                      std::vector<std::pair<std::string, std::string>>& rows) {
  const auto add = [&](const std::string& name, const SimulationResult& result) {
    rows.emplace_back(
        name, fmt::format("{}, exposed communication {} ({:.2f} % of it)", text_of_us(result.total_us),
                          text_of_us(exposed_us(result)), 100 * exposed_share(call, result)));
  };
  if (!call.way_reason.empty()) rows.emplace_back("method", call.way_reason);
  if (call.parts) rows.emplace_back("parts", call.parts->reason);
  add("serial", call.serial);
  if (call.sliced) add(fmt::format("{} slices", problem.baseline_slices), *call.sliced);
  if (call.way != OverlapWay::kSerial) add(std::string(name_of(call.way)), call.overlap);
}

std::string table(const SimulateOptions& options, const MachineProfile& machine, const SimulatedCall& call) {
  const ProblemOptions& p = options.problem;
  const TuneChoice& choice = call.tuned.best;
  const RankSimulation& worst = *std::max_element(
      call.overlap.ranks.begin(), call.overlap.ranks.end(),
      [](const RankSimulation& a, const RankSimulation& b) { return a.finish_us < b.finish_us; });
  std::vector<std::pair<std::string, std::string>> rows = {
      {"operator", fmt::format("{} m={} n={} k={} {}, {} ranks", name_of(p.op), p.m, p.n, p.k,
                               name_of(p.dtype), p.ranks)},
      {"machine", fmt::format("{} ({}), simulated", machine.name, machine.provenance.kind)},
      {"plan", fmt::format("tile {}x{}, {} + {} units, {}", choice.tile.tile_m, choice.tile.tile_n,
                           choice.resources.compute_units, choice.resources.communication_units,
                           call.parts ? "slices" : "groups " + text_of_list(choice.partition))},
      {"", ""},
  };
  if (p.method) {
    add_exposed_rows(p, call, rows);
  } else {
    rows.emplace_back("serial", text_of_us(call.serial.total_us) + "  (simulated)");
    rows.emplace_back("overlapped", text_of_us(call.overlap.total_us) + "  (simulated)");
  }
  if (!call.parts) {
    rows.emplace_back("predicted", text_of_us(choice.prediction.total_us) + "  (closed form, overlapped)");
  }
  rows.emplace_back("speed-up", fmt::format("{:.3f}x", call.serial.total_us / call.overlap.total_us));
  rows.emplace_back("slowest rank",
                    fmt::format("computes until {}, {} exposed, communicates for {}, units idle {:.1f} %",
                                text_of_us(worst.compute_us), text_of_us(worst.exposed_us),
                                text_of_us(worst.communicating_us), 100 * worst.idle_fraction));
  std::string text = to_table(rows);
  text += "\nWhat the time consists of, the end first:\n";
  for (const std::string& link : call.overlap.critical_path) text += "  " + link + "\n";
  if (!call.overlap.timeline.spans.empty()) {
    constexpr int kWidth = 100;
    Timeline few;
    for (const Span& span : call.overlap.timeline.spans) {
      const bool shown = span.rank < 2 && (!span.track.starts_with("compute ") || span.track == "compute 0");
      if (shown) few.spans.push_back(span);
    }
    text += "\nSimulated ('#' compute, '=' communication, '.' wait, 'e' epilogue):\n" + to_text(few, kWidth);
  }
  return text;
}

std::vector<std::pair<std::int64_t, double>> parse_slow(const std::string& text) {
  std::vector<std::pair<std::int64_t, double>> slow;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    const std::size_t colon = item.find(':');
    if (colon == std::string::npos) {
      throw CLI::ValidationError("--slow", fmt::format("'{}' is not RANK:FACTOR, for example 2:1.5", item));
    }
    constexpr IntegerRange kRanks{0, 1 << 24};
    slow.emplace_back(parse_integer("--slow", item.substr(0, colon), kRanks),
                      parse_number("--slow", item.substr(colon + 1), 0.001, 1000));
    begin = end + 1;
  }
  return slow;
}

int simulate_one(SimulateCommand& command, const MachineProfile& machine) {
  constexpr std::int64_t kPictured = 2;
  constexpr std::int64_t kTraced = 64;
  command.simulate.simulation.timeline_ranks = command.trace_path.empty() ? kPictured : kTraced;
  const SimulatedCall call = simulate_call(command.simulate, machine);
  if (!command.trace_path.empty()) {
    write_file("--trace", command.trace_path,
               [&](std::ostream& out) { write_chrome_trace(call.overlap.timeline, out); });
  }
  if (command.json) {
    print_json(simulated_json(command.simulate, machine, call));
  } else {
    fmt::print("{}", table(command.simulate, machine, call));
  }
  return kExitSuccess;
}

int simulate(SimulateCommand& command) {
  if (!command.trace_path.empty()) require_writable("--trace", command.trace_path);
  if (!command.csv_path.empty()) require_writable("--csv", command.csv_path);
  command.simulate.simulation.slow_ranks = parse_slow(command.slow);
  if (command.machine.empty()) {
    throw CLI::ValidationError("--machine",
                               "is needed: a shipped profile's name or a file of flashoverlap profile");
  }
  const MachineProfile machine = load_machine_profile(command.machine);
  if (command.sweep.empty()) {
    if (!command.csv_path.empty()) throw CLI::ValidationError("--csv", "is for --sweep");
    return simulate_one(command, machine);
  }
  const std::vector<SweepRow> rows = sweep(command.simulate, machine, command.sweep);
  if (!command.csv_path.empty()) {
    const std::string csv = sweep_csv(rows);
    write_file("--csv", command.csv_path, [&](std::ostream& out) { out << csv; });
  }
  if (command.json) {
    print_json(sweep_json(rows, machine));
  } else {
    fmt::print("{}", sweep_text(rows, machine));
  }
  return kExitSuccess;
}

}  // namespace

void add_simulate_command(CLI::App& app, Action& action) {
  CLI::App* sub =
      app.add_subcommand("simulate", "Run an operator's plans on a machine that need not be there");
  const auto command = std::make_shared<SimulateCommand>();
  add_problem_options(*sub, std::shared_ptr<ProblemOptions>(command, &command->simulate.problem),
                      MethodOptions::kPresent);
  sub->add_option("--machine", command->machine,
                  fmt::format("A file, or one of {}", fmt::join(shipped_machine_profiles(), ", ")))
      ->type_name("NAME|FILE");
  constexpr double kMaxJitter = 1;
  add_number(*sub, "--jitter", command->simulate.simulation.jitter, 0, kMaxJitter,
             "Relative standard deviation of tile and transfer times")
      ->default_str("0");
  sub->add_option("--slow", command->slow, "Ranks whose tiles take longer: RANK:FACTOR, …")
      ->type_name("LIST");
  sub->add_option("--sweep", command->sweep,
                  "Vary one thing and print a table: m=1024,2048 (or n, k, ranks, units)")
      ->type_name("NAME=LIST");
  sub->add_option("--csv", command->csv_path, "Write the sweep's table as comma-separated values")
      ->type_name("FILE");
  sub->add_flag("--json", command->json, "Print one JSON object instead of the table");
  sub->add_option("--trace", command->trace_path,
                  "Write the overlapped call as Chrome trace events (ui.perfetto.dev)")
      ->type_name("FILE");
  sub->footer(
      "\nExamples: flashoverlap simulate gemm-all-reduce -m 8192 -n 8192 -k 2048 --dtype f16 --ranks 8 "
      "--machine 8x-a800-nvlink\n"
      "          flashoverlap simulate gemm-all-reduce --dtype bf16 -m 8192 -n 8192 -k 4096 --machine "
      "2x8-h100-infiniband "
      "--sweep ranks=8,16,64,256,1024");
  add_moe_simulate(*sub, action);
  add_sliced_simulate(*sub, action);
  add_layer_simulate(*sub, action);
  sub->callback([sub, command, &action] {
    if (!sub->get_subcommands().empty()) return;
    action = [command] {
      command->simulate.simulation.seed = command->simulate.problem.seed;
      return simulate(*command);
    };
  });
}

}  // namespace flashoverlap::cli

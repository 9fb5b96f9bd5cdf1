#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <memory>

#include "commands.h"
#include "flashoverlap/version.h"
#include "format.h"
#include "machine_probe.h"

namespace flashoverlap::cli {
namespace {

std::string text_of(const Finding& finding) {
  std::string text = finding.usable ? "usable" : finding.found ? "found, not usable" : "not found";
  if (!finding.detail.empty()) text += ": " + finding.detail;
  if (!finding.reason.empty()) text += fmt::format("\n{:11}({})", "", finding.reason);
  return text;
}

std::string to_text(const Machine& machine) {
  std::vector<std::pair<std::string, std::string>> rows{
      {"version", fmt::format("flashoverlap {}", kVersion)},
      {"processor", fmt::format("{}, {} core{} usable, {}", machine.processor, machine.cores,
                                machine.cores == 1 ? "" : "s", fmt::join(machine.features, " "))},
      {"memory", fmt::format("{:.1f} GiB", machine.memory_gib)}};
  for (const Finding& finding : machine.findings) {
    rows.emplace_back(finding.name, text_of(finding));
    if (finding.name != "CUDA") continue;
    for (std::size_t i = 0; i < machine.gpus.size(); ++i)
      rows.emplace_back(fmt::format("GPU {}", i), text_of(machine.gpus[i]));
  }
  return to_table(rows);
}

nlohmann::ordered_json to_json(const Machine& machine) {
  nlohmann::ordered_json object{{"version", kVersion},
                                {"processor", machine.processor},
                                {"cores", machine.cores},
                                {"features", machine.features},
                                {"memory_gib", machine.memory_gib}};
  for (const Finding& finding : machine.findings) {
    object["components"][finding.name] = {{"found", finding.found},
                                          {"usable", finding.usable},
                                          {"detail", finding.detail},
                                          {"reason", finding.reason}};
  }
  object["gpus"] = nlohmann::ordered_json::array();
  for (const Gpu& gpu : machine.gpus) {
    object["gpus"].push_back({{"name", gpu.name},
                              {"compute_capability", gpu.compute_capability},
                              {"sms", gpu.sms},
                              {"memory_gib", gpu.memory_gib},
                              {"peers", gpu.peers}});
  }
  return object;
}

}  // namespace

void add_doctor_command(CLI::App& app, Action& action) {
  CLI::App* sub =
      app.add_subcommand("doctor", "Say what this machine offers, what can be used, and why not the rest");
  const auto json = std::make_shared<bool>(false);
  sub->add_flag("--json", *json, "Print one JSON object instead of text");
  sub->callback([json, &action] {
    action = [json] {
      const Machine machine = probe_machine();
      if (*json) {
        print_json(to_json(machine));
      } else {
        fmt::print("{}", to_text(machine));
      }
      return kExitSuccess;
    };
  });
}

}  // namespace flashoverlap::cli

#include "run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>
#include <vector>

#include "exit_codes.h"
#include "flashoverlap/version.h"
#include "format.h"
#include "paced_run.h"

namespace flashoverlap::cli {
namespace {

/// The plan with the most waves; they differ in all-to-all only.
const OverlapPlan& longest_plan(const RunResult& result) {
  return *std::max_element(
      result.plans.begin(), result.plans.end(),
      [](const OverlapPlan& x, const OverlapPlan& y) { return x.num_waves() < y.num_waves(); });
}

std::string shape_text(const ProblemOptions& problem) {
  std::string text =
      fmt::format("{}  m={} n={} k={} {}, {} rank{}", name_of(problem.op), problem.m, problem.n, problem.k,
                  name_of(problem.dtype), problem.ranks, problem.ranks == 1 ? "" : "s");
  if (problem.method) {
    const std::vector<std::int64_t>& sizes = problem.slices.sizes;
    return text + fmt::format(", method {}, slices {}", name_of(*problem.method),
                              sizes.empty() ? "equal" : text_of_list(sizes));
  }
  if (problem.op == Op::kGemmReduceScatter) text += fmt::format(", rows {}", name_of(problem.rows));
  if (problem.op != Op::kGemmAllToAll) return text;
  if (problem.rows_to_rank.empty()) return text + fmt::format(", skew {}", problem.skew);
  return text + ", rows to rank " + text_of_list(problem.rows_to_rank);
}

std::string link_text(const RunOptions& options, const LinkModel& link) {
  if (options.problem.is_job) return "between processes: MPI";
  if (link.bandwidth_gbps == 0 && link.latency_us == 0) return "not paced: copies in memory";
  std::string text = "paced to ";
  text += link.bandwidth_gbps == 0 ? "memory speed" : fmt::format("{:.3g} GB/s", link.bandwidth_gbps);
  text += fmt::format(" and {:.3g} us per transfer", link.latency_us);
  if (options.link_is_auto)
    text += fmt::format(", so that {} (see --link-gbps)",
                        options.problem.method ? "a slice's communication takes 0.9 of its computation"
                                               : "communication takes about as long as the GEMM");
  return text;
}

std::string machine_text(const RunResult& result) {
  if (result.backend != "cpu") {
    return fmt::format("{} backend, {} communicator", result.backend, result.communicator);
  }
  return fmt::format("{} backend, {} compute thread{} per rank, {} ranks", result.backend, result.threads,
                     result.threads == 1 ? "" : "s", result.communicator);
}

std::string plan_text(const OverlapPlan& plan) {
  const std::vector<std::int64_t> partition = plan.partition();
  return fmt::format("tiles of {}x{}: {}, waves: {}, groups: {}, partition: {}", plan.grid.tile_m(),
                     plan.grid.tile_n(), plan.grid.num_tiles(), plan.num_waves(), partition.size(),
                     text_of_list(partition));
}

std::string gain_text(const Gain& gain) {
  if (std::isnan(gain.share)) return fmt::format("{:.2f}x; there is nothing to hide", gain.speedup);
  return fmt::format("{:.2f}x, {:.0f} % of the possible gain", gain.speedup, 100 * gain.share);
}

std::string check_text(const RunResult& result) {
  const CheckResult& check = result.check;
  if (!check.correct()) return "WRONG: " + check.wrong;
  return fmt::format("correct on every rank: max error {:.2g}, tolerance {:.2g}{}", check.max_error,
                     check.tolerance, result.equals_serial ? "; same bits as serial" : "");
}

/// Both methods on one time axis, so that their lengths compare. A few tracks of a few ranks are enough to
/// see it.
std::string picture(const RunResult& result, int width) {
  constexpr std::int32_t kMaxRanks = 2;
  static constexpr std::string_view kHiddenTracks = "compute ";  // All but "compute 0".
  Timeline both;
  const auto add = [&both](const Timeline& timeline, const std::string& method) {
    double begin_us = std::numeric_limits<double>::infinity();
    for (const Span& span : timeline.spans) begin_us = std::min(begin_us, span.begin_us);
    for (Span span : timeline.spans) {
      if (span.rank >= kMaxRanks || (span.track.starts_with(kHiddenTracks) && span.track != "compute 0"))
        continue;
      span.track = method + ", " + span.track;
      span.begin_us -= begin_us;
      span.end_us -= begin_us;
      both.spans.push_back(std::move(span));
    }
  };
  add(result.serial, "serial");
  add(result.overlap, "overlapped");
  return to_text(both, width);
}

/// Where tile and partition come from, and the first line of why.
std::string choice_text(const TunedCall& choice) {
  if (choice.explanation == "given") return "partition given";
  const std::string first = choice.explanation.substr(0, choice.explanation.find('\n'));
  return fmt::format("{}: {}", name_of(choice.origin), first);
}

std::int64_t num_tiles(const RunResult& result) {
  std::int64_t tiles = 0;
  for (const OverlapPlan& plan : result.plans) tiles = std::max(tiles, plan.grid.num_tiles());
  return tiles;
}

/// The methods beside each other, with what of the communication shows.
void add_exposed_rows(const ProblemOptions& problem, const RunResult& result,
                      std::vector<std::pair<std::string, std::string>>& rows) {
  const Times& times = result.times;
  const auto row = [&](double total_us, double exposed_us) {
    return text_of_exposed(total_us, exposed_us, times.communication_us);
  };
  rows.emplace_back("serial", row(times.serial_us, times.serial_exposed_us));
  if (times.sliced_us) {
    rows.emplace_back(fmt::format("{} slices", problem.baseline_slices),
                      row(*times.sliced_us, times.sliced_exposed_us));
  }
  rows.emplace_back(name_of(*result.method), row(times.overlap_us, times.overlap_exposed_us));
  if (times.decomposed_us)
    rows.emplace_back("decomposed", row(*times.decomposed_us, times.decomposed_exposed_us));
}

/// What the JSON has besides with --method.
void add_exposed(const RunResult& result, nlohmann::ordered_json& json) {
  const Times& times = result.times;
  const auto share = [&](double exposed_us) {
    return times.communication_us > 0 ? exposed_us / times.communication_us : 0;
  };
  json["method"] = name_of(*result.method);
  json["exposed_us"] = times.overlap_exposed_us;
  json["exposed_share"] = share(times.overlap_exposed_us);
  json["serial_exposed_share"] = share(times.serial_exposed_us);
  if (times.sliced_us) {
    json["sliced_us"] = *times.sliced_us;
    json["sliced_exposed_share"] = share(times.sliced_exposed_us);
  }
  if (times.decomposed_us) {
    json["decomposed_us"] = *times.decomposed_us;
    json["decomposed_exposed_share"] = share(times.decomposed_exposed_us);
  }
}

}  // namespace

Gain gain_of(const Times& times) {
  Gain gain;
  gain.bound_us = std::max(times.gemm_us, times.communication_us);
  gain.speedup = times.serial_us / times.overlap_us;
  const double possible_us = times.serial_us - gain.bound_us;
  gain.share = possible_us > 0 ? (times.serial_us - times.overlap_us) / possible_us : std::nan("");
  return gain;
}

std::string run_text(const RunOptions& options, const RunResult& result) {
  const Times& times = result.times;
  const Gain gain = gain_of(times);
  constexpr int kWidth = 100;
  std::vector<std::pair<std::string, std::string>> rows = {
      {"operator", shape_text(options.problem)}, {"machine", machine_text(result)},
      {"link", link_text(options, result.link)}, {"plan", plan_text(longest_plan(result))},
      {"chosen", choice_text(result.choice)},    {"", ""},
      {"GEMM alone", text_of_us(times.gemm_us)}, {"communication alone", text_of_us(times.communication_us)}};
  if (result.method) {
    add_exposed_rows(options.problem, result, rows);
  } else {
    rows.emplace_back("serial", text_of_us(times.serial_us) + "  (one after the other)");
    rows.emplace_back("overlapped", text_of_us(times.overlap_us));
  }
  rows.emplace_back("bound", text_of_bound(gain.bound_us, times.overlap_us, "GEMM"));
  rows.emplace_back("speed-up", gain_text(gain));
  rows.emplace_back("result", check_text(result));
  std::string text = to_table(rows);
  text += fmt::format(
      "\nMedians of {} iteration{}. The last one ('#' compute, '=' communication, '.' wait, 'e' epilogue):\n",
      options.iterations, options.iterations == 1 ? "" : "s");
  return text + picture(result, kWidth);
}

nlohmann::ordered_json run_json(const RunOptions& options, const RunResult& result) {
  const ProblemOptions& problem = options.problem;
  const OverlapPlan& plan = longest_plan(result);
  const Gain gain = gain_of(result.times);
  nlohmann::ordered_json json = {
      {"op", name_of(problem.op)},
      {"backend", result.backend},
      {"communicator", result.communicator},
      {"ranks", problem.ranks},
      {"threads", result.threads},
      {"m", problem.m},
      {"n", problem.n},
      {"k", problem.k},
      {"dtype", name_of(problem.dtype)},
      {"tile_m", plan.grid.tile_m()},
      {"tile_n", plan.grid.tile_n()},
      {"tiles", num_tiles(result)},
      {"waves", plan.num_waves()},
      {"partition", plan.partition()},
      {"partition_origin", result.choice.explanation == "given" ? "given" : name_of(result.choice.origin)},
      {"link_gbps", result.link.bandwidth_gbps},
      {"link_latency_us", result.link.latency_us},
      {"iterations", options.iterations},
      {"gemm_us", result.times.gemm_us},
      {"communication_us", result.times.communication_us},
      {"serial_us", result.times.serial_us},
      {"overlap_us", result.times.overlap_us},
      {"bound_us", gain.bound_us},
      {"bound_share", gain.bound_us / result.times.overlap_us},
      {"speedup", gain.speedup},
      {"share_of_possible_gain", gain.share},
      {"max_error", result.check.max_error},
      {"tolerance", result.check.tolerance},
      {"correct", result.check.correct()},
      {"equals_serial", result.equals_serial},
      {"seed", problem.seed},
      {"version", kVersion}};
  if (result.method) add_exposed(result, json);
  return json;
}

int print_run(const RunOptions& options, const RunResult& result, bool json) {
  if (json) {
    print_json(run_json(options, result));
  } else {
    fmt::print("{}", run_text(options, result));
  }
  if (result.check.correct()) return kExitSuccess;
  fmt::print(stderr, "flashoverlap: wrong result: {}\n", result.check.wrong);
  return kExitFailure;
}

}  // namespace flashoverlap::cli

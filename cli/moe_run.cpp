#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/half.h"
#include "format.h"
#include "gpu_moe_run.h"
#include "moe_data.h"
#include "moe_gradient_check.h"
#include "moe_measure.h"
#include "moe_options.h"
#include "moe_splits.h"
#include "option_values.h"
#include "process_ranks.h"

/// `flashoverlap run moe-layer`: checked, measured serially and overlapped.
namespace flashoverlap::cli {
namespace {

using Json = nlohmann::ordered_json;

/// SMs, when nothing is said.
constexpr std::int64_t kConsumersOnGpus = 16;

std::string row_of(const MoePhases& p) {
  return fmt::format(
      "counts {}, gather {}, dispatch + first GEMM {}, activation {}, second GEMM + return {}, sum {}",
      text_of_us(p.counts_us), text_of_us(p.gather_us), text_of_us(p.dispatch_us),
      text_of_us(p.activation_us), text_of_us(p.combine_us), text_of_us(p.reduce_us));
}

bool is_correct(const MoeRun& run, const MoeResult& result) {
  const DType dtype = parse_dtype(run.problem.dtype);
  return result.error <= moe_error_limit(dtype) && result.gradient_error <= moe_gradient_error_limit(dtype) &&
         (result.equals_serial || !result.same_bits_expected);
}

bool is_correct(const MoeRun& run, const GpuMoeResult& result) {
  const DType dtype = parse_dtype(run.problem.dtype);
  return result.error <= moe_error_limit(dtype) && result.gradient_error <= moe_gradient_error_limit(dtype) &&
         result.equals_serial;
}

std::string_view name_of_way(Method method) {
  return method == Method::kSerial ? "serial" : "overlapped";
}

std::string text_of(const MoeRun& run, const MoeChosen& chosen) {
  return fmt::format("{}, {}: {}, {:.3f}x over serial ({})", run.overlap_if, name_of_way(chosen.method),
                     text_of_us(chosen.us), chosen.speedup, chosen.choice);
}

std::string ratios_of(const MoePass& pass) {
  return fmt::format("{:.3f} of the return, {:.3f} of the dispatch", pass.combine_hidden,
                     pass.dispatch_hidden);
}

const char* bits_text(bool equals_serial) {
  return equals_serial ? "bit for bit the serial result" : "not bit for bit the serial result";
}

/// Of one layer on CPUs or GPUs.
template <class Result>
std::string check_text(const MoeRun& run, const Result& r) {
  const DType dtype = parse_dtype(run.problem.dtype);
  std::string text =
      fmt::format("{}: largest relative error {:.3g} (limit {:.3g}) in {} tokens, ",
                  is_correct(run, r) ? "OK" : "WRONG", r.error, moe_error_limit(dtype), r.checked);
  if (r.backward) {
    text += fmt::format("{:.3g} (limit {:.3g}) in {} elements of gradients, ", r.gradient_error,
                        moe_gradient_error_limit(dtype), r.gradients_checked);
  }
  return text + bits_text(r.equals_serial);
}

using Rows = std::vector<std::pair<std::string, std::string>>;

/// "gradients of weights" are those that backward computes besides its two GEMMs.
void add_backward(const MoePass& pass, Rows& rows) {
  const auto row = [](double us, const MoePhases& p) {
    return fmt::format("{}: {}, gradients of weights {}", text_of_us(us), row_of(p),
                       text_of_us(p.weights_us));
  };
  rows.emplace_back("", "");
  rows.emplace_back("backward", "serial " + row(pass.serial_us, pass.serial));
  rows.emplace_back("overlapped", row(pass.overlap_us, pass.overlap));
  rows.emplace_back("speed-up", fmt::format("{:.3f}x", pass.speedup));
  rows.emplace_back(
      "GEMMs alone",
      fmt::format("{} and {}; {} and {} to send", text_of_us(pass.parts.dispatch_gemm_us),
                  text_of_us(pass.parts.combine_gemm_us), text_of_us(pass.parts.dispatch_transfer_us),
                  text_of_us(pass.parts.combine_transfer_us)));
  rows.emplace_back("overlap ratio", ratios_of(pass));
  rows.emplace_back("other work",
                    fmt::format("{} of gradients of weights while rows travelled", text_of_us(pass.work_us)));
  rows.emplace_back("", "");
}

void print_table(const MoeRun& run, const MoeResult& r) {
  const MoeProblem& p = run.problem;
  const MoePass& f = r.forward;
  const bool paced = r.link.bandwidth_gbps > 0 || r.link.latency_us > 0;
  Rows rows = {
      {"operator", text_of(p)},
      {"link",
       paced ? fmt::format("{:.4g} GB/s, {:.4g} us", r.link.bandwidth_gbps, r.link.latency_us) : "not paced"},
      {"layout", fmt::format("{}, {} bands a segment, {} consumers, {} compute threads", p.padding,
                             r.report.setting.segment_bands, r.report.setting.consumers,
                             r.report.setting.compute_units)},
      {"", ""},
      {"serial", fmt::format("{}: {}", text_of_us(f.serial_us), row_of(f.serial))},
      {"overlapped", fmt::format("{}: {}", text_of_us(f.overlap_us), row_of(f.overlap))},
      {"speed-up", fmt::format("{:.3f}x", f.speedup)},
      {"second GEMM",
       fmt::format("{:.3f}x with its return: {} alone, {} to send", f.combine_speedup,
                   text_of_us(f.parts.combine_gemm_us), text_of_us(f.parts.combine_transfer_us))},
      {"overlap ratio", ratios_of(f)},
      {"consumers",
       fmt::format("backlog {}, idle {:.0f} %", text_of_us(r.backlog_us), 100 * r.consumer_idle)},
  };
  if (r.backward) add_backward(*r.backward, rows);
  rows.insert(
      rows.end(),
      {
          {"wasted rows", fmt::format("{} of {} computed if all tiles cost the same; the paper's padding: "
                                      "{} of {}",
                                      r.waste.wasted_rows(), r.waste.computed_rows, r.paper.wasted_rows(),
                                      r.paper.computed_rows)},
          {"dropped rows", std::to_string(r.report.all_dropped_rows)},
          {"adaptation", r.report.adaptation.empty() ? "off" : r.report.adaptation},
          {"check", check_text(run, r)},
      });
  if (r.chosen) rows.emplace_back("chosen", text_of(run, *r.chosen));
  fmt::print("{}", to_table(rows));
}

nlohmann::ordered_json json_of(const MoePhases& p) {
  return {{"counts_us", p.counts_us},         {"gather_us", p.gather_us},   {"dispatch_us", p.dispatch_us},
          {"activation_us", p.activation_us}, {"combine_us", p.combine_us}, {"reduce_us", p.reduce_us}};
}

Json json_of(const MoePass& pass) {
  Json serial = json_of(pass.serial);
  Json overlap = json_of(pass.overlap);
  serial["weights_us"] = pass.serial.weights_us;
  overlap["weights_us"] = pass.overlap.weights_us;
  return {{"serial_us", pass.serial_us},
          {"overlap_us", pass.overlap_us},
          {"speedup", pass.speedup},
          {"serial_phases", serial},
          {"overlap_phases", overlap},
          {"dispatch_overlap_ratio", pass.dispatch_hidden},
          {"combine_overlap_ratio", pass.combine_hidden},
          {"other_work_us", pass.work_us}};
}

Json json_of(const GpuMoePass& pass) {
  return {{"serial_us", pass.serial_us}, {"overlap_us", pass.overlap_us}, {"speedup", pass.speedup}};
}

Json json_of(const GpuMoePhases& p) {
  return {{"serial_phases", json_of(p.serial)},
          {"overlap_phases", json_of(p.overlap)},
          {"combine_speedup", p.combine_speedup},
          {"dispatch_gemm_us", p.parts.dispatch_gemm_us},
          {"dispatch_transfer_us", p.parts.dispatch_transfer_us},
          {"combine_gemm_us", p.parts.combine_gemm_us},
          {"combine_transfer_us", p.parts.combine_transfer_us},
          {"dispatch_overlap_ratio", p.dispatch_hidden},
          {"combine_overlap_ratio", p.combine_hidden},
          {"backlog_us", p.backlog_us},
          {"consumer_idle", p.consumer_idle}};
}

Json json_of(const std::optional<MoeChosen>& chosen) {
  return {{"chosen", chosen ? Json(name_of_way(chosen->method)) : Json()},
          {"chosen_us", chosen ? Json(chosen->us) : Json()},
          {"chosen_speedup", chosen ? Json(chosen->speedup) : Json()},
          {"choice", chosen ? Json(chosen->choice) : Json()}};
}

Json json_of(const MoeProblem& p) {
  return {
      {"ranks", p.ranks},     {"tokens", p.tokens}, {"hidden", p.hidden},   {"intermediate", p.intermediate},
      {"experts", p.experts}, {"top_k", p.top_k},   {"routing", p.routing}, {"dtype", p.dtype}};
}

void print_as_json(const MoeRun& run, const MoeResult& r) {
  const MoeProblem& p = run.problem;
  const MoePass& f = r.forward;
  Json json = {{"operator", "moe-layer"}};
  json.update(json_of(p));
  json.update({{"padding", p.padding},
               {"link_gbps", r.link.bandwidth_gbps},
               {"link_latency_us", r.link.latency_us},
               {"serial_us", f.serial_us},
               {"overlap_us", f.overlap_us},
               {"speedup", f.speedup},
               {"combine_speedup", f.combine_speedup},
               {"overlap_if", run.overlap_if}});
  json.update(json_of(r.chosen));
  json.update({{"serial_phases", json_of(f.serial)},
               {"overlap_phases", json_of(f.overlap)},
               {"dispatch_overlap_ratio", f.dispatch_hidden},
               {"combine_overlap_ratio", f.combine_hidden},
               {"backward", r.backward ? json_of(*r.backward) : Json()},
               {"max_relative_gradient_error", r.backward ? Json(r.gradient_error) : Json()},
               {"backlog_us", r.backlog_us},
               {"consumer_idle", r.consumer_idle},
               {"consumers", r.report.setting.consumers},
               {"segment_bands", r.report.setting.segment_bands},
               {"wasted_rows", r.waste.wasted_rows()},
               {"paper_wasted_rows", r.paper.wasted_rows()},
               {"dropped_rows", r.report.all_dropped_rows},
               {"max_relative_error", r.error},
               {"equals_serial", r.equals_serial},
               {"correct", is_correct(run, r)}});
  print_json(json);
}

/// Each GEMM with its transfers, in calls that wait for the device.
void add_phases(const GpuMoeResult& r, Rows& rows) {
  const GpuMoePhases& p = r.phases;
  const auto both = [](const MoePhases& phases) {
    return fmt::format("dispatch + first GEMM {}, second GEMM + return {}", text_of_us(phases.dispatch_us),
                       text_of_us(phases.combine_us));
  };
  rows.insert(rows.end(), {{"serial phases", both(p.serial)},
                           {"overlapped", both(p.overlap)},
                           {"second GEMM", fmt::format("{:.3f}x with its return: {} alone, {} to send",
                                                       p.combine_speedup, text_of_us(p.parts.combine_gemm_us),
                                                       text_of_us(p.parts.combine_transfer_us))},
                           {"overlap ratio", fmt::format("{:.3f} of the return, {:.3f} of the dispatch",
                                                         p.combine_hidden, p.dispatch_hidden)}});
  if (r.transport != MoeTransport::kPut) return;
  rows.insert(
      rows.end(),
      {{"consumers", fmt::format("{} of {} SMs, {} bands a segment; backlog {}, idle {:.0f} %",
                                 r.setting.consumers, r.setting.consumers + r.setting.compute_units,
                                 r.setting.segment_bands, text_of_us(p.backlog_us), 100 * p.consumer_idle)},
       {"adaptation", r.adaptation.empty() ? "off" : r.adaptation}});
}

void print_table(const MoeRun& run, const GpuMoeResult& r) {
  Rows rows = {
      {"operator", text_of(run.problem)},
      {"backend", fmt::format("cuda, {}", r.communicator)},
      {"", ""},
      {"serial", text_of_us(r.forward.serial_us)},
      {"overlapped", text_of_us(r.forward.overlap_us)},
      {"speed-up", fmt::format("{:.3f}x", r.forward.speedup)},
  };
  add_phases(r, rows);
  if (r.backward) {
    rows.insert(rows.end(), {{"", ""},
                             {"backward", "serial " + text_of_us(r.backward->serial_us)},
                             {"overlapped", text_of_us(r.backward->overlap_us)},
                             {"speed-up", fmt::format("{:.3f}x", r.backward->speedup)},
                             {"", ""}});
  }
  rows.insert(rows.end(), {{"wasted rows", fmt::format("{} of {} computed if all tiles cost the same",
                                                       r.waste.wasted_rows(), r.waste.computed_rows)},
                           {"dropped rows", std::to_string(r.dropped_rows)},
                           {"check", check_text(run, r)}});
  if (r.chosen) rows.emplace_back("chosen", text_of(run, *r.chosen));
  fmt::print("{}", to_table(rows));
}

void print_as_json(const MoeRun& run, const GpuMoeResult& r) {
  Json json = {{"operator", "moe-layer"}, {"backend", "cuda"}, {"communicator", r.communicator}};
  json.update(json_of(run.problem));
  json.update(json_of(r.forward));
  json.update(json_of(r.phases));
  json.update({{"transport", name_of(r.transport)},
               {"consumers", r.setting.consumers},
               {"segment_bands", r.setting.segment_bands},
               {"adaptation", r.adaptation},
               {"overlap_if", run.overlap_if}});
  json.update(json_of(r.chosen));
  json.update({{"backward", r.backward ? json_of(*r.backward) : Json()},
               {"max_relative_gradient_error", r.backward ? Json(r.gradient_error) : Json()},
               {"wasted_rows", r.waste.wasted_rows()},
               {"dropped_rows", r.dropped_rows},
               {"max_relative_error", r.error},
               {"equals_serial", r.equals_serial},
               {"correct", is_correct(run, r)}});
  print_json(json);
}

void check_machine(const MoeRun& run) {
  if ((run.overlap_if == "predicted") == !run.machine.empty()) return;
  throw CLI::ValidationError("--machine", run.machine.empty() ? "is needed with --overlap-if predicted"
                                                              : "is for --overlap-if predicted");
}

/// Whether splits are to be measured, and can be.
bool wants_splits(const MoeRun& run) {
  if (run.splits.empty() && run.then.empty()) return false;
  if (run.splits.empty()) throw CLI::ValidationError("--then", "is for --splits");
  if (!run.adapt) throw CLI::ValidationError("--splits", "needs --adapt");
  if (is_job()) throw CLI::ValidationError("--splits", "is not for ranks that are processes");
  return true;
}

int run_splits(MoeRun& run, const GpuOptions& gpu, bool json) {
  if (!gpu.on_gpus()) {
    print_splits(run, "cpu", measure_moe_splits(run), json);
    return kExitSuccess;
  }
  check_backend(gpu);
  if (run.problem.transport.empty()) run.problem.transport = "put";
  print_splits(run, "cuda", measure_moe_splits_on_gpus(run, gpu), json);
  return kExitSuccess;
}

int run_moe_on_gpus(MoeRun& run, const GpuOptions& gpu, bool json) {
  check_backend(gpu);
  check_machine(run);
  const GpuMoeResult result = measure_moe_on_gpus(run, gpu);
  if (json) {
    print_as_json(run, result);
  } else {
    print_table(run, result);
  }
  return is_correct(run, result) ? kExitSuccess : kExitFailure;
}

int run_moe(MoeRun& run, bool json) {
  check_machine(run);
  const MoeResult result = measure_moe(run);
  if (is_job() && !is_first_rank()) return kExitSuccess;
  if (json) {
    print_as_json(run, result);
  } else {
    print_table(run, result);
  }
  return is_correct(run, result) ? kExitSuccess : kExitFailure;
}

}  // namespace

void add_moe_run(CLI::App& parent, Action& action) {
  const auto run = std::make_shared<MoeRun>();
  const auto gpu = std::make_shared<GpuOptions>();
  const auto json = std::make_shared<bool>(false);
  CLI::App& sub = add_moe_subcommand(parent, std::shared_ptr<MoeProblem>(run, &run->problem),
                                     "Run a mixture-of-experts layer serially and overlapped, and check it");
  add_integer(sub, "--iterations", run->iterations, {1, 1'000'000},
              "Measured calls of each kind; medians are shown")
      ->default_str(std::to_string(run->iterations));
  sub.add_option_function<std::string>(
         "--link-gbps",
         [run](const std::string& text) {
           constexpr double kMax = 1e6;
           run->link_is_auto = text == "auto";
           if (!run->link_is_auto) run->link.bandwidth_gbps = parse_number("--link-gbps", text, 0, kMax);
         },
         "Pace each rank's link to so many 1e9 bytes a second; 0: as fast as memory is;\n"
         "auto: such that the return takes about as long as the second GEMM")
      ->type_name("auto|NUMBER")
      ->default_str("auto");
  constexpr double kMaxLatency = 1e6;
  add_number(sub, "--link-latency-us", run->link.latency_us, 0, kMaxLatency,
             "Latency of each transfer, with a number for --link-gbps")
      ->default_str("0");
  sub.add_flag("--adapt", run->adapt, "Let the layer change consumers and segments between calls");
  sub.add_option(
         "--splits", run->splits,
         "With --adapt: measure layers that keep so many consumers, with 1, 2, 4 and 8 bands a segment\n"
         "each, and how near to the best of them the one that adapts comes in 20 calls")
      ->type_name("LIST")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024).description(""));
  sub.add_option("--then", run->then,
                 "With --splits: the same again with these routings, one after the other")
      ->type_name("LIST")
      ->delimiter(',')
      ->check(CLI::IsMember({"balanced", "moderate", "stress"}).description(""));
  sub.add_flag("--backward", run->backward, "Run, check and measure the backward pass as well");
  add_choice(
      sub, "--overlap-if", run->overlap_if, {"always", "measured", "predicted"},
      "Which calls are overlapped. Not always: measured beside serial and overlapped too, with the choice\n"
      "by what the first calls show, or by what a machine profile says")
      ->default_str(run->overlap_if);
  sub.add_option("--machine", run->machine, "For --overlap-if predicted: a file, or a shipped profile")
      ->type_name("NAME|FILE");
  add_gpu_options(sub, gpu);
  sub.add_flag("--json", *json, "Print one JSON object instead of the table");
  sub.footer("\nExample: flashoverlap run moe-layer --tokens 2048 --experts 16 --ranks 4 --routing stress");
  sub.callback([&sub, run, gpu, json, &action] {
    require_options_behind(sub);
    if (gpu->on_gpus() && sub.count("--consumers") == 0) run->problem.consumers = kConsumersOnGpus;
    action = [run, gpu, json] {
      check_gpu_options(*gpu);
      if (wants_splits(*run)) return run_splits(*run, *gpu, *json);
      return gpu->on_gpus() ? run_moe_on_gpus(*run, *gpu, *json) : run_moe(*run, *json);
    };
  });
}

}  // namespace flashoverlap::cli
#include "layer_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/fail.h"
#include "core/median.h"
#include "files.h"
#include "flashoverlap/in_process.h"
#include "format.h"
#include "layer_measure.h"
#include "layer_options.h"
#include "option_values.h"
#include "sliced_options.h"

/// `flashoverlap run mlp-tpsp|linear-dp|attention-tpsp|attention-up`: whole layers, checked against float64,
/// measured overlapped and serially.
namespace flashoverlap::cli {
namespace {

using Json = nlohmann::ordered_json;
using layers::Layer;

/// One rank on threads of the CPU.
class CpuLayerRank {
 public:
  CpuLayerRank(const std::shared_ptr<Communicator>& communicator, const LayerRun& run)
      : communicator_(*communicator),
        context_(communicator, context_options(run)),
        place_(context_, parse_dtype(run.dtype)),
        layer_(run.make_layer(place_)) {}

  [[nodiscard]] Layer& layer() { return *layer_; }
  [[nodiscard]] int num_threads() const { return context_.num_threads(); }
  double time_us(const std::function<void()>& call) { return slowest_us(communicator_, call); }

 private:
  static ContextOptions context_options(const LayerRun& run) {
    ContextOptions result;
    result.num_threads = static_cast<int>(run.threads);
    return result;
  }

  Communicator& communicator_;
  Context context_;
  layers::HostPlace place_;
  std::unique_ptr<Layer> layer_;
};

/// Two exchanges, as if both had as much to hide behind.
LinkModel link_of_layer(const LayerRun& run) {
  std::vector<double> computation;
  double bytes = 0;
  std::mutex mutex;
  run_ranks(static_cast<int>(run.ranks), {}, [&](const std::shared_ptr<Communicator>& communicator) {
    CpuLayerRank rank(communicator, run);
    rank.layer().run();  // so that later runs compute with numbers
    for (int call = 0; call < 3; ++call) {
      const double us = rank.time_us([&] { rank.layer().run(Method::kOverlap, Mode::kPlainGemm, nullptr); });
      if (communicator->rank() == 0) computation.push_back(us);
    }
    const std::lock_guard lock(mutex);
    bytes = std::max(bytes, rank.layer().bytes_sent());
  });
  return matching_link(bytes, core::median(computation), run.ranks, 2, run.link.model.latency_us);
}

LayerResult measure(const LayerRun& run) {
  SharedLayer shared;
  LayerResult& result = shared.result;
  result.link = run.link.is_auto ? link_of_layer(run) : run.link.model;
  run_ranks(static_cast<int>(run.ranks), {.link = result.link},
            [&](const std::shared_ptr<Communicator>& communicator) {
              CpuLayerRank rank(communicator, run);
              measure_layer_rank(
                  {.layer = rank.layer()},
                  {.time_us = [&](const std::function<void()>& call) { return rank.time_us(call); },
                   .meet = [&] { meet(*communicator); }},
                  communicator->rank(), run, shared);
              if (communicator->rank() == 0) result.threads = rank.num_threads();
            });
  result.machine = fmt::format("cpu backend, {} compute thread{} per rank", result.threads,
                               result.threads == 1 ? "" : "s");
  return std::move(shared.result);
}

void print_result(const LayerRun& options, const LayerResult& r) {
  const bool on_gpus = options.gpu->on_gpus();
  const double bound_us = std::max(r.computation_us, r.communication_us);
  if (options.json) {
    print_json(
        {{"layer", options.name},
         {"shape", options.shape},
         {"backend", options.gpu->backend},
         {"machine", r.machine},
         {"ranks", options.ranks},
         {"threads", r.threads},
         {"dtype", options.dtype},
         {"link_gbps", r.link.bandwidth_gbps},
         {"link_latency_us", r.link.latency_us},
         {"iterations", options.iterations},
         {"computation_us", r.computation_us},
         {"communication_us", r.communication_us},
         {"serial_us", r.serial_us},
         {"sliced_us", r.sliced_us ? Json(*r.sliced_us) : Json()},
         {"overlap_us", r.overlap_us},
         {"decomposed_us", r.decomposed_us ? Json(*r.decomposed_us) : Json()},
         {"bound_us", bound_us},
         {"bound_share", bound_us / r.overlap_us},
         {"exposed_us", r.overlap_exposed_us},
         {"exposed_share", r.share_of(r.overlap_exposed_us)},
         {"sliced_exposed_share", r.sliced_us ? Json(r.share_of(r.sliced_exposed_us)) : Json()},
         {"decomposed_exposed_share", r.decomposed_us ? Json(r.share_of(r.decomposed_exposed_us)) : Json()},
         {"speedup", r.serial_us / r.overlap_us},
         {"max_error", r.error},
         {"correct", r.correct},
         {"equals_serial", on_gpus ? Json() : Json(r.equals_serial)},
         {"seed", options.seed}});
    return;
  }
  const auto row = [&](double total_us, double exposed_us) {
    return text_of_exposed(total_us, exposed_us, r.communication_us);
  };
  std::vector<std::pair<std::string, std::string>> rows = {
      {"layer", fmt::format("{}  {} {}, {} rank{}", options.name, options.shape, options.dtype, options.ranks,
                            options.ranks == 1 ? "" : "s")},
      {"machine", r.machine},
      {"link", text_of(r.link)},
      {"", ""},
      {"computation alone", text_of_us(r.computation_us)},
      {"communication alone", text_of_us(r.communication_us) + "  (as collectives)"},
      {"serial", row(r.serial_us, r.serial_exposed_us)}};
  std::string speed_up = fmt::format("{:.2f}x over serial", r.serial_us / r.overlap_us);
  if (r.sliced_us) {
    rows.emplace_back(fmt::format("{} slices", options.baseline_slices),
                      row(*r.sliced_us, r.sliced_exposed_us));
    speed_up += fmt::format(", {:.2f}x over slices", *r.sliced_us / r.overlap_us);
  }
  rows.emplace_back("tail-free", row(r.overlap_us, r.overlap_exposed_us));
  if (r.decomposed_us) {
    rows.emplace_back("decomposed", row(*r.decomposed_us, r.decomposed_exposed_us));
    speed_up += fmt::format(", {:.2f}x over decomposed", *r.decomposed_us / r.overlap_us);
  }
  rows.emplace_back("bound", text_of_bound(bound_us, r.overlap_us, "computation"));
  rows.emplace_back("speed-up", speed_up);
  rows.emplace_back("result", fmt::format("{} on every rank: max error {:.2g} of the largest value{}",
                                          r.correct ? "correct" : "WRONG", r.error,
                                          !on_gpus && r.equals_serial ? "; same bits as serial" : ""));
  fmt::print("{}", to_table(rows));
}

int run_layer(const LayerRun& options) {
  const bool on_gpus = options.gpu->on_gpus();
  check_gpu_options(*options.gpu);
  if (!options.trace_path.empty()) require_writable("--trace", options.trace_path);
  const LayerResult result = on_gpus ? measure_layer_on_gpus(options) : measure(options);
  if (!options.trace_path.empty()) {
    write_file("--trace", options.trace_path,
               [&](std::ostream& out) { write_chrome_trace(result.timeline, out); });
  }
  print_result(options, result);
  // On GPUs the serial GEMM is cuBLAS's, and NCCL's sums are its own.
  if (result.correct && (result.equals_serial || on_gpus)) return kExitSuccess;
  fmt::print(stderr, "flashoverlap: wrong result: {}\n",
             result.correct
                 ? "tail-free and serial differ"
                 : fmt::format("error {:.3g}; expected at most {:.3g}", result.error, result.largest_error));
  return kExitFailure;
}

MakeLayer maker_of(const std::shared_ptr<const LayerSizes>& sizes) {
  return [sizes](layers::Place& place, std::uint64_t seed, const BaselineOptions& baseline) {
    switch (sizes->kind) {
      case LayerKind::kMlpTpsp:
        return layers::make_mlp_tpsp(place, sizes->mlp, seed, baseline);
      case LayerKind::kLinearDp:
        return layers::make_linear_dp(place, sizes->linear, seed, baseline);
      case LayerKind::kAttentionTpsp:
        return layers::make_attention_tpsp(place, sizes->attention, seed, baseline);
      case LayerKind::kAttentionUp:
        return layers::make_attention_up(place, sizes->attention, seed);
    }
    core::fail(ErrorKind::kInternal, "layer {} is not known here", static_cast<int>(sizes->kind));
  };
}

Action add_layer(CLI::App& sub, const std::shared_ptr<LayerSizes>& sizes) {
  const auto run = std::make_shared<LayerRun>();
  run->name = name_of(sizes->kind);
  run->make = maker_of(sizes);
  const auto integer = [&](const char* option, std::int64_t& value, IntegerRange range, const char* text) {
    add_integer(sub, option, value, range, text)->default_str(std::to_string(value));
  };
  integer("--ranks", run->ranks, {1, 64}, "World size: ranks are threads of this process");
  add_choice(sub, "--dtype", run->dtype, {"f32", "bf16", "f16"}, "Element type")->default_str(run->dtype);
  if (sizes->kind != LayerKind::kAttentionUp) {
    integer("--baseline-slices", run->baseline_slices, {1, 1024},
            "Slices of the baseline with one collective for each");
  } else {
    run->baseline_slices = 0;
  }
  integer("--iterations", run->iterations, {1, 1'000'000}, "Measured calls of each kind");
  add_integer_or_auto(sub, "--threads", run->threads, {1, 1024}, "Compute threads of each rank")
      ->default_str("auto");
  add_link_options(sub, run->link);
  add_gpu_options(sub, run->gpu);
  add_decomposed_option(sub, run->gpu);
  sub.add_flag("--json", run->json, "Print one JSON object instead of the table");
  sub.add_option("--trace", run->trace_path, "Write the last call as Chrome trace events")->type_name("FILE");
  add_seed(sub, run->seed);
  return [run, sizes] {
    check_sizes(*sizes, run->ranks);
    run->shape = text_of(*sizes);
    return run_layer(*run);
  };
}

}  // namespace

void add_layer_run(CLI::App& parent, Action& action) {
  add_layer_subcommands(parent, action, add_layer);
}

}  // namespace flashoverlap::cli

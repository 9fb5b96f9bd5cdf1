#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/median.h"
#include "exit_codes.h"
#include "files.h"
#include "format.h"
#include "option_values.h"
#include "sliced_measure.h"
#include "sliced_options.h"

/// `flashoverlap run` for operators whose data travels in slices: checked, and measured tail-free, in slices
/// on a collective each, and serially.
namespace flashoverlap::cli {
namespace {

/// One rank on threads of the CPU.
class CpuSlicedRank final : public SlicedCalls {
 public:
  CpuSlicedRank(std::shared_ptr<Communicator> communicator, const SlicedProblem& p,
                const std::vector<Inputs>& inputs, const std::shared_ptr<const CallTuner>& tuner)
      : communicator_(*communicator),
        context_(std::move(communicator), context_options(p)),
        op_(make_operator(p, tuner)),
        data_(p, inputs, static_cast<std::size_t>(communicator_.rank()), *op_) {}

  [[nodiscard]] int num_threads() const { return context_.num_threads(); }

  double time_us(Method method, Mode mode) override {
    return slowest_us(communicator_, [&] { run(method, mode, nullptr); });
  }

  const Matrix& run_afresh(Method method, Timeline* timeline) override {
    data_.out().poison();
    run(method, Mode::kRun, timeline);
    return data_.out();
  }

  [[nodiscard]] const SlicedData& data() const override { return data_; }

 private:
  static ContextOptions context_options(const SlicedProblem& p) {
    ContextOptions options;
    options.num_threads = static_cast<int>(p.threads);
    return options;
  }
  std::unique_ptr<GemmOperator> make_operator(const SlicedProblem& p,
                                              const std::shared_ptr<const CallTuner>& tuner) {
    context_.set_tuner(tuner);
    return make_sliced_operator(context_, p);
  }

  void run(Method method, Mode mode, Timeline* timeline) {
    op_->run({.a = data_.a(method).data(),
              .lda = data_.lda(),
              .b = data_.b(method).data(),
              .ldb = data_.ldb(),
              .out = data_.out().data(),
              .ldo = data_.out().cols(),
              .epilogue = {}},
             method, mode, timeline);
  }

  Communicator& communicator_;
  Context context_;
  std::unique_ptr<GemmOperator> op_;
  SlicedData data_;
};

/// Bytes that the busiest rank sends or receives.
double wire_bytes(const SlicedProblem& p) {
  const auto ranks = static_cast<double>(p.ranks);
  const double element = static_cast<double>(size_of(parse_dtype(p.dtype)));
  const auto m = static_cast<double>(p.m);
  const auto n = static_cast<double>(p.n);
  const auto k = static_cast<double>(p.k);
  const double whole = p.op == SlicedOp::kAllGatherGemm   ? m * k
                       : p.op == SlicedOp::kShardedWeight ? n * k
                       : p.op == SlicedOp::kHeads         ? m * n / ranks
                       : p.op == SlicedOp::kFromHeads     ? m * k / ranks
                                                          : m * n;
  return (ranks - 1) / ranks * whole * element;
}

LinkModel link_of_gemm(const SlicedProblem& p, const std::vector<Inputs>& inputs, double latency_us) {
  std::vector<double> gemm_us;
  run_ranks(static_cast<int>(p.ranks), {}, [&](std::shared_ptr<Communicator> communicator) {
    const bool is_first = communicator->rank() == 0;
    CpuSlicedRank run(std::move(communicator), p, inputs, nullptr);
    (void)run.time_us(Method::kOverlap, Mode::kPlainGemm);
    for (int call = 0; call < 3; ++call) {
      const double us = run.time_us(Method::kOverlap, Mode::kPlainGemm);
      if (is_first) gemm_us.push_back(us);
    }
  });
  return matching_link(wire_bytes(p), core::median(gemm_us), p.ranks, 1, latency_us);
}

SlicedResult measure(const SlicedProblem& p, const SlicedRun& options) {
  const std::vector<Inputs> inputs = make_sliced_inputs(p);
  SharedSliced shared;
  SlicedResult& result = shared.result;
  result.link =
      options.link.is_auto ? link_of_gemm(p, inputs, options.link.model.latency_us) : options.link.model;
  result.parts.explanation = given_parts(p);
  const auto tuner = make_tuner(options.tuning, p.ranks, threads_per_rank(p.threads, p.ranks), result.link,
                                std::nullopt, [&](const TunedCall& chosen) { result.parts = chosen; });
  run_ranks(static_cast<int>(p.ranks), {.link = result.link},
            [&](std::shared_ptr<Communicator> communicator) {
              const int rank = communicator->rank();
              CpuSlicedRank run(std::move(communicator), p, inputs, tuner);
              measure_sliced_rank(run, rank, options, SumRounding::kOnce, shared);
              if (rank == 0) result.threads = run.num_threads();
            });
  result.machine = fmt::format("cpu backend, {} compute thread{} per rank", result.threads,
                               result.threads == 1 ? "" : "s");
  return std::move(shared.result);
}

void print_result(const SlicedProblem& p, const SlicedRun& options, const SlicedResult& r) {
  using Json = nlohmann::ordered_json;
  const double bound_us = std::max(r.gemm_us, r.communication_us);
  if (options.json) {
    print_json(
        {{"op", name_of(p.op)},
         {"backend", options.gpu->backend},
         {"machine", r.machine},
         {"ranks", p.ranks},
         {"threads", r.threads},
         {"m", p.m},
         {"n", p.n},
         {"k", p.k},
         {"dtype", p.dtype},
         {"link_gbps", r.link.bandwidth_gbps},
         {"link_latency_us", r.link.latency_us},
         {"iterations", options.iterations},
         {"gemm_us", r.gemm_us},
         {"communication_us", r.communication_us},
         {"slice_ratio", r.slice_ratio(p.ranks)},
         {"serial_us", r.serial_us},
         {"sliced_us", r.sliced_us},
         {"overlap_us", r.overlap_us},
         {"decomposed_us", r.decomposed_us ? Json(*r.decomposed_us) : Json()},
         {"bound_us", bound_us},
         {"bound_share", bound_us / r.overlap_us},
         {"parts", r.parts.explanation},
         {"exposed_us", r.overlap_exposed_us},
         {"exposed_share", r.share_of(r.overlap_exposed_us)},
         {"sliced_exposed_share", r.share_of(r.sliced_exposed_us)},
         {"decomposed_exposed_share", r.decomposed_us ? Json(r.share_of(r.decomposed_exposed_us)) : Json()},
         {"speedup", r.serial_us / r.overlap_us},
         {"max_error", r.max_error},
         {"correct", r.wrong.empty()},
         {"equals_serial", r.equals_serial},
         {"seed", p.seed}});
    return;
  }
  const auto row = [&](double total_us, double exposed_us) {
    return text_of_exposed(total_us, exposed_us, r.communication_us);
  };
  std::vector<std::pair<std::string, std::string>> rows = {
      {"operator", text_of(p)},
      {"machine", r.machine},
      {"link", text_of(r.link)},
      {"parts", r.parts.explanation},
      {"", ""},
      {"GEMM alone", text_of_us(r.gemm_us)},
      {"communication alone", text_of_us(r.communication_us) + "  (as one collective)"},
      {"of a slice", fmt::format("communication takes {:.2f} of its computation", r.slice_ratio(p.ranks))},
      {"serial", row(r.serial_us, r.serial_exposed_us)},
      {fmt::format("{} slices", p.baseline_slices), row(r.sliced_us, r.sliced_exposed_us)},
      {"tail-free", row(r.overlap_us, r.overlap_exposed_us)}};
  std::string speed_up = fmt::format("{:.2f}x over serial, {:.2f}x over slices", r.serial_us / r.overlap_us,
                                     r.sliced_us / r.overlap_us);
  if (r.decomposed_us) {
    rows.emplace_back("decomposed", row(*r.decomposed_us, r.decomposed_exposed_us));
    speed_up += fmt::format(", {:.2f}x over decomposed", *r.decomposed_us / r.overlap_us);
  }
  rows.emplace_back("bound", text_of_bound(bound_us, r.overlap_us, "GEMM"));
  rows.emplace_back("speed-up", speed_up);
  rows.emplace_back("result", r.wrong.empty()
                                  ? fmt::format("correct on every rank: max error {:.2g}{}", r.max_error,
                                                r.equals_serial ? "; same bits as serial" : "")
                                  : "WRONG: " + r.wrong);
  fmt::print("{}", to_table(rows));
}

int run_sliced(const SlicedProblem& p, const SlicedRun& options) {
  check_gpu_options(*options.gpu);
  if (options.gpu->on_gpus() && !options.tuning.machine.empty())
    throw CLI::ValidationError("--machine", "slices on GPUs are not chosen by simulation yet; leave it out");
  if (!options.trace_path.empty()) require_writable("--trace", options.trace_path);
  const bool on_gpus = options.gpu->on_gpus();
  const SlicedResult result = on_gpus ? measure_sliced_on_gpus(p, options) : measure(p, options);
  if (!options.trace_path.empty()) {
    write_file("--trace", options.trace_path,
               [&](std::ostream& out) { write_chrome_trace(result.timeline, out); });
  }
  print_result(p, options, result);
  // On GPUs the serial GEMM is cuBLAS's, and NCCL's sums are its own.
  if (result.wrong.empty() && (result.equals_serial || on_gpus)) return kExitSuccess;
  fmt::print(stderr, "flashoverlap: wrong result: {}\n",
             result.wrong.empty() ? "tail-free and serial differ" : result.wrong);
  return kExitFailure;
}

}  // namespace

void add_sliced_run(CLI::App& parent, Action& action) {
  add_sliced_subcommands(parent, action, [](CLI::App& sub, const std::shared_ptr<SlicedProblem>& problem) {
    const auto run = std::make_shared<SlicedRun>();
    add_integer(sub, "--iterations", run->iterations, {1, 1'000'000}, "Measured calls of each kind")
        ->default_str(std::to_string(run->iterations));
    add_link_options(sub, run->link);
    add_gpu_options(sub, run->gpu);
    add_decomposed_option(sub, run->gpu);
    run->tuning.no_cache = true;  // it has no entries for slices
    add_machine_option(sub, run->tuning, "of this machine, where flashoverlap profile made one");
    sub.add_flag("--json", run->json, "Print one JSON object instead of the table");
    sub.add_option("--trace", run->trace_path, "Write the last tail-free call as Chrome trace events")
        ->type_name("FILE");
    return Action([=] { return run_sliced(*problem, *run); });
  });
}

}  // namespace flashoverlap::cli

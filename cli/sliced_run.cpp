#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "core/fail.h"
#include "core/median.h"
#include "exit_codes.h"
#include "files.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/timeline.h"
#include "format.h"
#include "matrices.h"
#include "option_values.h"
#include "paced_run.h"
#include "sliced_options.h"
#include "tuning_options.h"

/// `flashoverlap run` for operators whose data travels in slices: checked, and measured tail-free, in slices
/// on a collective each, and serially.
namespace flashoverlap::cli {
namespace {

struct SlicedRun {
  std::int64_t iterations = 5;
  TuningOptions tuning;
  LinkChoice link;
  std::string trace_path;
  bool json = false;
};

struct SlicedResult {
  LinkModel link;
  double gemm_us = 0;  ///< Medians of the slowest rank's time.
  double communication_us = 0;
  double serial_us = 0;
  double serial_exposed_us = 0;
  double sliced_us = 0;
  double sliced_exposed_us = 0;
  double overlap_us = 0;
  double overlap_exposed_us = 0;
  TunedCall parts;  ///< Where the parts of slices come from.
  double max_error = 0;
  std::string wrong;  ///< Empty: correct.
  bool equals_serial = true;
  int threads = 0;
  Timeline timeline;

  /// Of a slice, communication over computation, as it was in this run: the link is paced to 0.9 by GEMMs
  /// that ran before, and a machine whose speed changes makes it another. Above 1 the difference must show.
  [[nodiscard]] double slice_ratio(std::int64_t ranks) const {
    if (ranks < 2 || gemm_us <= 0) return 0;
    const auto world = static_cast<double>(ranks);
    return communication_us / (world - 1) / (gemm_us / world);
  }
  [[nodiscard]] double share_of(double exposed_us) const {
    return communication_us > 0 ? exposed_us / communication_us : 0;
  }
};

bool gathers(const SlicedProblem& p) {
  return p.op == SlicedOp::kAllGatherGemm || p.op == SlicedOp::kShardedWeight;
}

bool reduces(const SlicedProblem& p) {
  return p.op == SlicedOp::kGradient;
}

/// What each rank multiplies, once all has arrived.
std::vector<Inputs> make_inputs(const SlicedProblem& p) {
  const DType dtype = parse_dtype(p.dtype);
  const auto rows = slice_begins({}, p.m, static_cast<std::int32_t>(p.ranks));
  std::vector<Inputs> inputs;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(p.ranks); ++rank) {
    const bool same_a = p.op == SlicedOp::kAllGatherGemm || p.op == SlicedOp::kFromHeads;
    const bool same_b = p.op == SlicedOp::kShardedWeight || plan::along_heads(p.op);
    const std::int64_t m = p.op == SlicedOp::kHeads ? rows[rank + 1] - rows[rank] : p.m;
    inputs.push_back({random_matrix(m, p.k, dtype, p.seed, same_a ? 0 : 2 * rank),
                      random_matrix(p.n, p.k, dtype, p.seed, same_b ? 1 : 2 * rank + 1)});
  }
  return inputs;
}

std::unique_ptr<GemmOperator> make_sliced_operator(Context& context, const SlicedProblem& p,
                                                   const std::shared_ptr<const CallTuner>& tuner) {
  context.set_tuner(tuner);
  const BaselineOptions baseline{.num_slices = p.baseline_slices};
  const GemmOptions gemm = gemm_options(p);
  const SliceOptions slices = slice_options(p);
  switch (p.op) {
    case SlicedOp::kAllGatherGemm:
      return std::make_unique<AllGatherGemm>(context, gemm, slices, baseline);
    case SlicedOp::kShardedWeight:
      return std::make_unique<ShardedWeightGemm>(context, gemm, slices, baseline);
    case SlicedOp::kReduceScatter:  // run_measure.cpp has it
    case SlicedOp::kGradient:
      return std::make_unique<GradientReduceScatter>(context, gemm, slices, baseline);
    case SlicedOp::kHeads:
      return std::make_unique<GemmAllToAll>(context, gemm, head_slices(p), baseline);
    case SlicedOp::kFromHeads:
      return std::make_unique<AllToAllGemm>(context, gemm, head_slices(p), baseline);
  }
  core::fail(ErrorKind::kInternal, "operator {} is not known here", static_cast<int>(p.op));
}

/// Rows of `whole` in the order `order` (empty: as they are), all but those in [begin, end) unset.
Matrix own_rows(const Matrix& whole, const std::vector<std::int64_t>& order, std::int64_t begin,
                std::int64_t end) {
  Matrix part(whole.rows(), whole.cols(), whole.dtype());
  std::vector<float> row(static_cast<std::size_t>(whole.cols()));
  for (std::int64_t i = 0; i < whole.rows(); ++i) {
    const std::int64_t source = order.empty() ? i : order[static_cast<std::size_t>(i)];
    if (source < begin || source >= end) continue;
    whole.read_row(source, row.data());
    part.write_row(i, row.data());
  }
  return part;
}

/// Columns [begin, end) of `whole`, dense.
Matrix own_columns(const Matrix& whole, std::int64_t begin, std::int64_t end) {
  Matrix part(whole.rows(), end - begin, whole.dtype());
  std::vector<float> row(static_cast<std::size_t>(whole.cols()));
  for (std::int64_t i = 0; i < whole.rows(); ++i) {
    whole.read_row(i, row.data());
    part.write_row(i, row.data() + begin);
  }
  return part;
}

/// The same elements in pieces of columns, one dense matrix after the other: see
/// plan_sliced_all_to_all_gemm. As one row.
Matrix in_pieces(const Matrix& whole, std::int64_t num_pieces) {
  Matrix pieces(1, whole.rows() * whole.cols(), whole.dtype());
  std::vector<float> all(static_cast<std::size_t>(pieces.cols()));
  std::vector<float> row(static_cast<std::size_t>(whole.cols()));
  for (std::int64_t i = 0; i < whole.rows(); ++i) {
    whole.read_row(i, row.data());
    for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
      const std::int64_t begin = piece * whole.cols() / num_pieces;
      const std::int64_t end = (piece + 1) * whole.cols() / num_pieces;
      std::copy(row.data() + begin, row.data() + end, all.data() + whole.rows() * begin + i * (end - begin));
    }
  }
  pieces.write_row(0, all.data());
  return pieces;
}

/// One rank's operator with its matrices.
class SlicedRank {
 public:
  SlicedRank(std::shared_ptr<Communicator> communicator, const SlicedProblem& p,
             const std::vector<Inputs>& inputs, const std::shared_ptr<const CallTuner>& tuner)
      : p_(p),
        inputs_(inputs),
        rank_(static_cast<std::size_t>(communicator->rank())),
        context_(std::move(communicator), context_options(p)),
        op_(make_sliced_operator(context_, p, tuner)),
        out_(op_->output_rows(), op_->plan().output_cols, parse_dtype(p.dtype)) {
    const auto world = static_cast<std::int32_t>(p.ranks);
    const bool columns = p.op == SlicedOp::kShardedWeight;
    begins_ = slice_begins(slice_options(p), sliced_size(p), world);
    rows_ = slice_begins({}, p.m, world);
    if (p.op == SlicedOp::kFromHeads) {
      gathered_ = own_columns(inputs[rank_].a, begins_[rank_], begins_[rank_ + 1]);
      sliced_ = in_pieces(gathered_, p.baseline_slices);
    }
    const TileGrid& grid = op_->plan().grid;
    if (p.op == SlicedOp::kHeads) order_ = sliced_rows({}, p.m, world, grid.tile_m(), p.baseline_slices);
    if (!gathers(p)) return;
    order_ = sliced_rows(slice_options(p), sliced_size(p), world, columns ? grid.tile_n() : grid.tile_m(),
                         p.baseline_slices);
    const Matrix& whole = columns ? inputs[rank_].b : inputs[rank_].a;
    gathered_ = own_rows(whole, {}, begins_[rank_], begins_[rank_ + 1]);
    sliced_ = own_rows(whole, order_, begins_[rank_], begins_[rank_ + 1]);
  }

  [[nodiscard]] int num_threads() const { return context_.num_threads(); }

  void run(Method method, Mode mode, Timeline* timeline = nullptr) {
    Operands operands;
    operands.a = inputs_[rank_].a.data();
    operands.b = inputs_[rank_].b.data();
    const Matrix& arriving = method == Method::kSliced ? sliced_ : gathered_;
    if (p_.op == SlicedOp::kAllGatherGemm) operands.a = arriving.data();
    if (p_.op == SlicedOp::kShardedWeight) operands.b = arriving.data();
    operands.lda = operands.ldb = p_.k;
    if (p_.op == SlicedOp::kFromHeads) {
      operands.a = arriving.data();
      operands.lda = gathered_.cols();
    }
    operands.out = out_.data();
    operands.ldo = out_.cols();
    op_->run(operands, method, mode, timeline);
  }

  const Matrix& run_afresh(Method method, Timeline* timeline = nullptr) {
    out_.poison();
    run(method, Mode::kRun, timeline);
    return out_;
  }

  /// A sample of elements against fp64. Returns what is wrong, or nothing.
  std::string check(const Matrix& out, Method method, double& max_error) const {
    constexpr std::int64_t kSample = 2000;
    const std::int64_t size = out.rows() * out.cols();
    std::mt19937_64 random(p_.seed + rank_);
    std::vector<float> row(static_cast<std::size_t>(out.cols()));
    for (std::int64_t i = 0; i < std::min(kSample, size); ++i) {
      const auto index = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(size));
      const std::int64_t at_row = index / out.cols();
      const std::int64_t at_col = index % out.cols();
      out.read_row(at_row, row.data());
      const double actual = static_cast<double>(row[static_cast<std::size_t>(at_col)]);
      double tolerance = 0;
      const double expected = element(at_row, at_col, method, tolerance);
      const double error = std::abs(actual - expected);
      max_error = std::max(max_error, error);
      if (!(error <= tolerance)) {
        return fmt::format("rank {}, element [{}, {}] is {}; expected {} within {:.3g}", rank_, at_row,
                           at_col, actual, expected, tolerance);
      }
    }
    return {};
  }

 private:
  static ContextOptions context_options(const SlicedProblem& p) {
    ContextOptions options;
    options.num_threads = static_cast<int>(p.threads);
    return options;
  }

  /// Tolerances as in result_check.h.
  [[nodiscard]] double element(std::int64_t row, std::int64_t col, Method method, double& tolerance) const {
    const bool sliced = method == Method::kSliced;
    std::size_t first = rank_;
    std::size_t last = rank_;
    if (sliced && p_.op == SlicedOp::kAllGatherGemm) row = order_[static_cast<std::size_t>(row)];
    if (sliced && p_.op == SlicedOp::kShardedWeight) col = order_[static_cast<std::size_t>(col)];
    if (reduces(p_)) {
      row += begins_[rank_];
      first = 0;
      last = inputs_.size() - 1;
    }
    if (p_.op == SlicedOp::kHeads) {
      if (sliced) row = order_[static_cast<std::size_t>(row)];
      first = last = static_cast<std::size_t>(std::ranges::upper_bound(rows_, row) - rows_.begin() - 1);
      row -= rows_[first];
      col += begins_[rank_];
    }
    if (p_.op == SlicedOp::kFromHeads) row += rows_[rank_];
    const DType dtype = parse_dtype(p_.dtype);
    const double storage = dtype == DType::kFloat32 ? 0 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
    std::vector<float> a(static_cast<std::size_t>(p_.k));
    std::vector<float> b(a.size());
    double sum = 0;
    for (std::size_t source = first; source <= last; ++source) {
      inputs_[source].a.read_row(row, a.data());
      inputs_[source].b.read_row(col, b.data());
      double partial = 0;
      for (std::size_t i = 0; i < a.size(); ++i)
        partial += static_cast<double>(a[i]) * static_cast<double>(b[i]);
      sum += partial;
      tolerance += 2 * static_cast<double>(p_.k + 1) * 0x1p-24 + storage * std::abs(partial);
    }
    tolerance = 1.01 * (tolerance + storage * std::abs(sum)) + (storage > 0 ? 0x1p-24 : 0);
    return sum;
  }

  const SlicedProblem& p_;
  const std::vector<Inputs>& inputs_;
  std::size_t rank_;
  Context context_;
  std::unique_ptr<GemmOperator> op_;
  Matrix out_;
  Matrix gathered_;
  Matrix sliced_;
  std::vector<std::int64_t> begins_;
  std::vector<std::int64_t> rows_;
  std::vector<std::int64_t> order_;
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
    SlicedRank run(communicator, p, inputs, nullptr);
    run.run(Method::kOverlap, Mode::kPlainGemm);
    for (int call = 0; call < 3; ++call) {
      const double us = slowest_us(*communicator, [&] { run.run(Method::kOverlap, Mode::kPlainGemm); });
      if (communicator->rank() == 0) gemm_us.push_back(us);
    }
  });
  return matching_link(wire_bytes(p), core::median(gemm_us), p.ranks, 1, latency_us);
}

SlicedResult measure(const SlicedProblem& p, const SlicedRun& options) {
  const std::vector<Inputs> inputs = make_inputs(p);
  SlicedResult result;
  result.link =
      options.link.is_auto ? link_of_gemm(p, inputs, options.link.model.latency_us) : options.link.model;
  result.parts.explanation = p.parts > 0 ? fmt::format("{}, given", p.parts) : "as few as leave no tail";
  if (p.send_channels > 0)
    result.parts.explanation += fmt::format(", {} slices at a time, given", p.send_channels);
  const auto tuner = make_tuner(options.tuning, p.ranks, threads_per_rank(p.threads, p.ranks), result.link,
                                std::nullopt, [&](const TunedCall& chosen) { result.parts = chosen; });
  std::mutex mutex;
  run_ranks(static_cast<int>(p.ranks), {.link = result.link},
            [&](std::shared_ptr<Communicator> communicator) {
              SlicedRank run(communicator, p, inputs, tuner);
              std::vector<double> gemm, communication, serial, sliced, overlap;
              const auto checked = [&] {
                const Matrix serial_out = run.run_afresh(Method::kSerial);
                double error = 0;
                std::string wrong;
                wrong = run.check(run.run_afresh(Method::kSliced), Method::kSliced, error);
                Timeline timeline;
                const Matrix& out = run.run_afresh(Method::kOverlap, &timeline);
                if (wrong.empty()) wrong = run.check(out, Method::kOverlap, error);
                const std::lock_guard lock(mutex);
                if (result.wrong.empty()) result.wrong = wrong;
                result.max_error = std::max(result.max_error, error);
                result.equals_serial = result.equals_serial && out == serial_out;
                result.threads = run.num_threads();
                result.timeline.spans.insert(result.timeline.spans.end(), timeline.spans.begin(),
                                             timeline.spans.end());
              };
              for (std::int64_t i = 0; i < options.iterations; ++i) {
                const auto timed = [&](std::vector<double>& times, Method method, Mode mode) {
                  times.push_back(slowest_us(*communicator, [&] { run.run(method, mode); }));
                };
                timed(serial, Method::kSerial, Mode::kRun);
                timed(sliced, Method::kSliced, Mode::kRun);
                timed(overlap, Method::kOverlap, Mode::kRun);
                timed(gemm, Method::kOverlap, Mode::kPlainGemm);
                timed(communication, Method::kSerial, Mode::kCommunicationOnly);
              }
              checked();
              if (communicator->rank() != 0) return;
              const std::lock_guard lock(mutex);
              result.gemm_us = core::median(gemm);
              result.communication_us = core::median(communication);
              result.serial_us = core::median(serial);
              result.serial_exposed_us = exposed_us(serial, gemm);
              result.sliced_us = core::median(sliced);
              result.sliced_exposed_us = exposed_us(sliced, gemm);
              result.overlap_us = core::median(overlap);
              result.overlap_exposed_us = exposed_us(overlap, gemm);
            });
  return result;
}

void print_result(const SlicedProblem& p, const SlicedRun& options, const SlicedResult& r) {
  if (options.json) {
    print_json({{"op", name_of(p.op)},
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
                {"parts", r.parts.explanation},
                {"exposed_us", r.overlap_exposed_us},
                {"exposed_share", r.share_of(r.overlap_exposed_us)},
                {"sliced_exposed_share", r.share_of(r.sliced_exposed_us)},
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
      {"machine",
       fmt::format("cpu backend, {} compute thread{} per rank", r.threads, r.threads == 1 ? "" : "s")},
      {"link", text_of(r.link)},
      {"parts", r.parts.explanation},
      {"", ""},
      {"GEMM alone", text_of_us(r.gemm_us)},
      {"communication alone", text_of_us(r.communication_us) + "  (as one collective)"},
      {"of a slice", fmt::format("communication takes {:.2f} of its computation", r.slice_ratio(p.ranks))},
      {"serial", row(r.serial_us, r.serial_exposed_us)},
      {fmt::format("{} slices", p.baseline_slices), row(r.sliced_us, r.sliced_exposed_us)},
      {"tail-free", row(r.overlap_us, r.overlap_exposed_us)},
      {"speed-up", fmt::format("{:.2f}x over serial, {:.2f}x over slices", r.serial_us / r.overlap_us,
                               r.sliced_us / r.overlap_us)}};
  rows.emplace_back("result", r.wrong.empty()
                                  ? fmt::format("correct on every rank: max error {:.2g}{}", r.max_error,
                                                r.equals_serial ? "; same bits as serial" : "")
                                  : "WRONG: " + r.wrong);
  fmt::print("{}", to_table(rows));
}

int run_sliced(const SlicedProblem& p, const SlicedRun& options) {
  if (!options.trace_path.empty()) require_writable("--trace", options.trace_path);
  const SlicedResult result = measure(p, options);
  if (!options.trace_path.empty()) {
    write_file("--trace", options.trace_path,
               [&](std::ostream& out) { write_chrome_trace(result.timeline, out); });
  }
  print_result(p, options, result);
  if (result.wrong.empty() && result.equals_serial) return kExitSuccess;
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
    run->tuning.no_cache = true;  // it has no entries for slices
    add_machine_option(sub, run->tuning, "of this machine, where flashoverlap profile made one");
    sub.add_flag("--json", run->json, "Print one JSON object instead of the table");
    sub.add_option("--trace", run->trace_path, "Write the last tail-free call as Chrome trace events")
        ->type_name("FILE");
    return Action([=] { return run_sliced(*problem, *run); });
  });
}

}  // namespace flashoverlap::cli

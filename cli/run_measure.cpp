#include "run_measure.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "checked_run.h"
#include "core/median.h"
#include "paced_run.h"
#include "process_ranks.h"

namespace flashoverlap::cli {
namespace {

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// The begin and end of each measured call on every rank. Ranks write their own entries only.
class Stopwatch {
 public:
  Stopwatch(std::int64_t ranks, std::int64_t calls)
      : ranks_(static_cast<std::size_t>(ranks)), spans_(ranks_ * static_cast<std::size_t>(calls)) {}

  /// Runs `call` on this rank once all ranks have come here.
  void time(Communicator& communicator, std::int64_t index, const std::function<void()>& call) {
    communicator.exchange(std::uint64_t{0}, {.operation = "start of a measured call"});
    Span& span =
        spans_[static_cast<std::size_t>(index) * ranks_ + static_cast<std::size_t>(communicator.rank())];
    span.begin_us = now_us();
    call();
    span.end_us = now_us();
  }

  /// Where ranks are processes, each knows its own times only. Clocks of several hosts differ, so only
  /// durations are shared: as if all had begun at the same moment.
  void gather_from(Communicator& communicator) {
    const auto own = static_cast<std::size_t>(communicator.rank());
    std::vector<double> durations;
    for (std::size_t i = own; i < spans_.size(); i += ranks_)
      durations.push_back(spans_[i].end_us - spans_[i].begin_us);
    const std::vector<std::vector<double>> all = gather(communicator, durations);
    for (std::size_t i = 0; i < spans_.size(); ++i) spans_[i] = {0, all[i % ranks_][i / ranks_]};
  }

  /// From the first rank's begin to the last rank's end, of each call.
  [[nodiscard]] std::vector<double> durations_us() const {
    std::vector<double> durations;
    for (std::size_t first = 0; first < spans_.size(); first += ranks_) {
      double begin_us = spans_[first].begin_us;
      double end_us = spans_[first].end_us;
      for (std::size_t i = first; i < first + ranks_; ++i) {
        begin_us = std::min(begin_us, spans_[i].begin_us);
        end_us = std::max(end_us, spans_[i].end_us);
      }
      durations.push_back(end_us - begin_us);
    }
    return durations;
  }
  [[nodiscard]] double median_us() const { return core::median(durations_us()); }

 private:
  struct Span {
    double begin_us = 0;
    double end_us = 0;
  };
  std::size_t ranks_;
  std::vector<Span> spans_;
};

/// One rank's operator with its matrices.
class RankRun {
 public:
  RankRun(std::shared_ptr<Communicator> communicator, const ProblemOptions& options, const Routing& routing,
          const Inputs& inputs)
      : context_(std::move(communicator), context_options(options)),
        op_(make_operator(context_, options, routing)),
        out_(op_->output_rows(), options.n, options.dtype) {
    operands_.a = inputs.a.data();
    operands_.lda = options.k;
    operands_.b = inputs.b.data();
    operands_.ldb = options.k;
    operands_.out = out_.data();
    operands_.ldo = options.n;
  }

  void run(Method method, Mode mode, Timeline* timeline = nullptr) {
    op_->run(operands_, method, mode, timeline);
  }

  /// Runs on a poisoned output and returns it.
  const Matrix& run_afresh(Method method, Timeline* timeline = nullptr) {
    out_.poison();
    run(method, Mode::kRun, timeline);
    return out_;
  }

  [[nodiscard]] const OverlapPlan& plan() const { return op_->plan(); }
  [[nodiscard]] const GemmOperator& op() const { return *op_; }
  [[nodiscard]] Context& context() { return context_; }

 private:
  Context context_;
  std::unique_ptr<GemmOperator> op_;
  Matrix out_;
  Operands operands_;
};

/// What the busiest rank puts on the wire for the whole communication. See LinkModel for the formulas.
double bytes_on_the_wire(const ProblemOptions& options, const Routing& routing) {
  const auto ranks = static_cast<double>(options.ranks);
  const double row_bytes = static_cast<double>(options.n) * static_cast<double>(size_of(options.dtype));
  const double whole = static_cast<double>(options.m) * row_bytes;
  if (options.op == Op::kGemmAllReduce) return 2 * (ranks - 1) / ranks * whole;
  if (options.op == Op::kGemmReduceScatter) return (ranks - 1) / ranks * whole;
  std::int64_t most_rows = 0;
  const auto world_size = static_cast<std::int32_t>(options.ranks);
  for (std::int32_t rank = 0; rank < world_size; ++rank) {
    std::int64_t sent = 0;
    std::int64_t received = 0;
    for (std::int32_t peer = 0; peer < world_size; ++peer) {
      if (peer == rank) continue;
      sent += routing.rows(rank, peer);
      received += routing.rows(peer, rank);
    }
    most_rows = std::max({most_rows, sent, received});
  }
  return static_cast<double>(most_rows) * row_bytes;
}

/// The GEMM alone, timed a few times: what pacing and prediction go by.
GemmSample time_gemm(const ProblemOptions& options, const SharedRun& shared) {
  constexpr std::int64_t kCalls = 3;
  Stopwatch gemm(options.ranks, kCalls);
  GemmSample sample{.m = options.m, .n = options.n, .k = options.k, .dtype = options.dtype};
  run_problem(options, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    const auto rank = static_cast<std::size_t>(communicator->rank());
    RankRun run(communicator, options, shared.routing, shared.inputs[rank]);
    run.run(Method::kSerial, Mode::kPlainGemm);  // Warm-up.
    for (std::int64_t call = 0; call < kCalls; ++call) {
      gemm.time(*communicator, call, [&] { run.run(Method::kSerial, Mode::kPlainGemm); });
    }
    if (rank != 0) return;
    sample.tile_m = run.plan().grid.tile_m();
    sample.tile_n = run.plan().grid.tile_n();
    sample.units = run.plan().resources.compute_units;
  });
  sample.duration_us = gemm.median_us();
  return sample;
}

/// The link on which the whole communication takes about as long as that GEMM; compared with slices, that of
/// matching_link.
LinkModel link_for(const ProblemOptions& options, const Routing& routing, double gemm_us, double latency_us) {
  const double bytes = bytes_on_the_wire(options, routing);
  if (options.method) return matching_link(bytes, gemm_us, options.ranks, 1, latency_us);
  if (bytes == 0) return {};
  constexpr double kBytesPerUsAtOneGbps = 1e3;
  const double transfer_us = std::max(gemm_us - latency_us, 1.0);
  return {.bandwidth_gbps = bytes / transfer_us / kBytesPerUsAtOneGbps, .latency_us = latency_us};
}

struct Stopwatches {
  Stopwatch gemm, communication, serial, sliced, overlap;
  Stopwatches(std::int64_t ranks, std::int64_t calls)
      : gemm(ranks, calls),
        communication(ranks, calls),
        serial(ranks, calls),
        sliced(ranks, calls),
        overlap(ranks, calls) {}
};

void measure_rank(const std::shared_ptr<Communicator>& communicator, const RunOptions& options,
                  SharedRun& shared, Stopwatches& watches) {
  const int rank = communicator->rank();
  const auto index = static_cast<std::size_t>(rank);
  RankRun run(communicator, options.problem, shared.routing, shared.inputs[index]);
  shared.result.plans[index] = run.plan();
  const bool has_sliced = options.problem.has_sliced();
  const bool is_alone = options.problem.is_job;
  if (rank == 0 || is_alone) {
    shared.result.threads = run.context().num_threads();
    shared.result.method = method_of(options.problem, run.op());
    const std::int64_t tile_m = run.plan().grid.tile_m();
    shared.check = std::make_unique<ResultCheck>(options.problem, shared.routing, shared.inputs, tile_m);
  }
  // The others may use the check only once rank 0 has made it.
  communicator->exchange(std::uint64_t{0}, {.operation = "making the reference"});

  run_checked(run, rank, shared, false, has_sliced);
  for (std::int64_t i = 0; i < options.iterations; ++i) {
    watches.serial.time(*communicator, i, [&] { run.run(Method::kSerial, Mode::kRun); });
    if (has_sliced) watches.sliced.time(*communicator, i, [&] { run.run(Method::kSliced, Mode::kRun); });
    watches.overlap.time(*communicator, i, [&] { run.run(Method::kOverlap, Mode::kRun); });
    watches.gemm.time(*communicator, i, [&] { run.run(Method::kSerial, Mode::kPlainGemm); });
    watches.communication.time(*communicator, i, [&] { run.run(Method::kSerial, Mode::kCommunicationOnly); });
  }
  communicator->exchange(std::uint64_t{0}, {.operation = "last checked run"});
  run_checked(run, rank, shared, true, has_sliced);
}

Times times_of(const Stopwatches& watches, bool has_sliced) {
  const std::vector<double> gemm = watches.gemm.durations_us();
  Times times;
  times.gemm_us = core::median(gemm);
  times.communication_us = watches.communication.median_us();
  times.serial_us = watches.serial.median_us();
  times.serial_exposed_us = exposed_us(watches.serial.durations_us(), gemm);
  times.overlap_us = watches.overlap.median_us();
  times.overlap_exposed_us = exposed_us(watches.overlap.durations_us(), gemm);
  if (!has_sliced) return times;
  times.sliced_us = watches.sliced.median_us();
  times.sliced_exposed_us = exposed_us(watches.sliced.durations_us(), gemm);
  return times;
}

/// Every process then has the whole result, so that all end with the same exit code.
void gather_results(SharedRun& shared, Stopwatches& watches, Communicator& communicator) {
  for (Stopwatch* watch :
       {&watches.gemm, &watches.communication, &watches.serial, &watches.sliced, &watches.overlap}) {
    watch->gather_from(communicator);
  }
  RunResult& result = shared.result;
  const std::string wrong = result.check.wrong;
  const auto texts = communicator.exchange(wrong, {.operation = "gathering the results"});
  const std::vector<double> own = {result.check.max_error, result.check.tolerance,
                                   static_cast<double>(result.check.elements),
                                   result.equals_serial ? 1.0 : 0.0};
  const std::vector<std::vector<double>> all = gather(communicator, own);
  result.check = {};
  result.equals_serial = true;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::vector<double>& values = all[rank];
    result.check.merge({.max_error = values[0],
                        .tolerance = values[1],
                        .elements = static_cast<std::int64_t>(values[2]),
                        .wrong = texts[rank]});
    result.equals_serial = result.equals_serial && values[3] > 0;
  }
}

}  // namespace

RunResult measure(const RunOptions& options) {
  const ProblemOptions& problem = options.problem;
  require_memory(memory_estimate(problem));
  SharedRun shared;
  shared.routing = problem.op == Op::kGemmAllToAll ? make_routing(problem) : Routing{};
  for (int rank = 0; rank < problem.ranks; ++rank) shared.inputs.push_back(make_inputs(problem, rank));
  shared.result.plans.resize(static_cast<std::size_t>(problem.ranks));
  const bool is_auto = options.link_is_auto && !problem.is_job;
  const bool is_paced = is_auto || options.link.bandwidth_gbps > 0;
  std::optional<GemmSample> gemm;
  if (is_paced) gemm = time_gemm(problem, shared);
  shared.result.link =
      is_auto ? link_for(problem, shared.routing, gemm->duration_us, options.link.latency_us) : options.link;

  RunOptions tuned = options;
  if (options.tuner_for) tuned.problem.tuner = options.tuner_for(shared.result.link, gemm);
  Stopwatches watches(problem.ranks, options.iterations);
  run_problem(tuned.problem, shared.result.link, [&](const std::shared_ptr<Communicator>& communicator) {
    measure_rank(communicator, tuned, shared, watches);
    if (communicator->rank() == 0 || problem.is_job) shared.result.communicator = communicator->name();
    if (problem.is_job) gather_results(shared, watches, *communicator);
  });
  shared.result.times = times_of(watches, problem.has_sliced());
  return std::move(shared.result);
}

}  // namespace flashoverlap::cli

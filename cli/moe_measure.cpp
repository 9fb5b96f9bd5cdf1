#include "moe_measure.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "core/median.h"
#include "flashoverlap/call_tuner.h"
#include "flashoverlap/machine_profile.h"
#include "moe_data.h"
#include "option_values.h"
#include "process_ranks.h"

namespace flashoverlap::cli {
namespace {

/// The slowest rank's value of each number.
std::vector<double> slowest(Communicator& communicator, const std::vector<double>& own) {
  std::vector<double> worst = own;
  for (const std::vector<double>& other : gather(communicator, own)) {
    for (std::size_t i = 0; i < worst.size(); ++i) {
      if (!(other[i] <= worst[i])) worst[i] = other[i];
    }
  }
  return worst;
}

std::vector<double> numbers_of(const MoePhases& p) {
  return {p.counts_us, p.gather_us, p.dispatch_us, p.activation_us, p.combine_us, p.reduce_us};
}

MoePhases phases_of(const std::vector<std::vector<double>>& calls) {
  const auto median = [&](std::size_t i) {
    std::vector<double> values;
    for (const auto& call : calls) values.push_back(call[i]);
    return core::median(values);
  };
  return {.counts_us = median(0),
          .gather_us = median(1),
          .dispatch_us = median(2),
          .activation_us = median(3),
          .combine_us = median(4),
          .reduce_us = median(5)};
}

/// Calls of one method: the medians of the slowest rank's whole time and phases.
struct Series {
  std::vector<double> total_us;
  std::vector<std::vector<double>> phases;
  std::vector<double> backlog_us;
  std::vector<double> idle;
  MoeReport last;

  void add(Communicator& communicator, MoeLayer& layer, MoeRankData& data, const MoeRouting& routing,
           Method method = Method::kOverlap) {
    const std::int64_t hidden = layer.options().hidden;
    communicator.exchange(std::uint64_t{0}, {.operation = "start of a measured call"});
    const auto begin = std::chrono::steady_clock::now();
    last = layer.forward(data.x.data(), hidden, routing, data.weights(), data.out.data(), hidden, method);
    const auto end = std::chrono::steady_clock::now();
    std::vector<double> own = numbers_of(last.phases);
    own.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    own.push_back(last.backlog_us);
    own.push_back(last.consumer_idle);
    std::vector<double> worst = slowest(communicator, own);
    idle.push_back(worst.back());
    worst.pop_back();
    backlog_us.push_back(worst.back());
    worst.pop_back();
    total_us.push_back(worst.back());
    phases.push_back(std::move(worst));
  }
};

/// The parts of calls alone, next to the overlapped call before: shares of the transfers that are hidden.
struct Hidden {
  std::vector<double> dispatch;
  std::vector<double> combine;
  std::vector<std::vector<double>> parts_us;

  void add(const std::vector<double>& parts, const std::vector<double>& phases) {
    const MoePhases call = phases_of({phases});
    dispatch.push_back(share(call.dispatch_us, parts[0], parts[1]));
    combine.push_back(share(call.combine_us, parts[2], parts[3]));
    parts_us.push_back(parts);
  }
  [[nodiscard]] double median(std::size_t part) const {
    std::vector<double> values;
    for (const auto& parts : parts_us) values.push_back(parts[part]);
    return core::median(values);
  }

 private:
  static double share(double phase_us, double gemm_us, double transfer_us) {
    if (transfer_us <= 0) return 1;
    return std::clamp(1 - (phase_us - gemm_us) / transfer_us, 0.0, 1.0);
  }
};

/// The median of first / second, pair by pair.
double median_ratio(const std::vector<double>& first, const std::vector<double>& second) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < first.size(); ++i) ratios.push_back(second[i] > 0 ? first[i] / second[i] : 1);
  return core::median(ratios);
}

std::vector<double> combine_us(const Series& series) {
  std::vector<double> values;
  for (const auto& phases : series.phases) values.push_back(phases_of({phases}).combine_us);
  return values;
}

MoeLayerOptions layer_options(const MoeRun& run, Communicator& communicator) {
  const MoeProblem& p = run.problem;
  const bool can_put = communicator.symmetric_heap() != nullptr;
  const MoeTransport transport = !p.transport.empty() ? parse_moe_transport(p.transport)
                                 : can_put            ? MoeTransport::kPut
                                                      : MoeTransport::kCollective;
  MoeLayerOptions options = moe_layer_options(p, transport);
  options.adapt = run.adapt;
  return options;
}

/// One rank: a layer that is told the method, and one that decides.
class MeasuredRank {
 public:
  MeasuredRank(const MoeRun& run, const std::shared_ptr<Communicator>& communicator,
               const MoeRouting& routing, const LinkModel& link)
      : run_(run),
        communicator_(*communicator),
        routing_(routing),
        context_(communicator, {.num_threads = static_cast<int>(run.problem.threads)}),
        layer_(context_, layer_options(run, communicator_)),
        data_(run.problem, communicator_.rank(), layer_.first_expert(), layer_.local_experts()) {
    const MoeOverlapIf overlap_if = parse_moe_overlap_if(run.overlap_if);
    if (overlap_if == MoeOverlapIf::kAlways) return;
    MoeLayerOptions options = layer_options(run, communicator_);
    options.overlap_if = overlap_if;
    if (overlap_if == MoeOverlapIf::kPredicted) {
      options.machine =
          std::make_shared<const MachineProfile>(paced(load_machine_profile(run.machine), link));
    }
    deciding_.emplace(context_, options);
  }

  /// Each way on a poisoned output, against float64 and against each other. Collective.
  void check(MoeResult& result) {
    const MoeProblem& p = run_.problem;
    std::vector<Matrix> outs;
    std::vector<double> own(2, 0);
    std::int64_t checked = 0;
    const auto call = [&](MoeLayer& layer, Method method) {
      data_.out.poison();
      layer.forward(data_.x.data(), p.hidden, routing_, data_.weights(), data_.out.data(), p.hidden, method);
      const double error = moe_error(p, routing_, data_, checked);
      if (!(error <= own[0])) own[0] = error;
      outs.push_back(data_.out);
    };
    call(layer_, Method::kSerial);
    call(layer_, Method::kOverlap);
    if (deciding_) {
      for (std::int64_t i = 0; i <= kTrialCalls; ++i) call(*deciding_, Method::kOverlap);
    }
    own[1] = std::ranges::all_of(outs, [&](const Matrix& out) { return out == outs[0]; }) ? 0 : 1;
    const std::vector<double> worst = slowest(communicator_, own);
    result.error = worst[0];
    result.checked = checked;
    result.equals_serial = worst[1] == 0;
    result.same_bits_expected = layer_.options().padding == MoePadding::kRagged;
  }

  void measure(MoeResult& result) {
    Series serial;
    Series overlap;
    Series chosen;
    Hidden hidden;
    for (std::int64_t i = 0; i < run_.iterations; ++i) {
      serial.add(communicator_, layer_, data_, routing_, Method::kSerial);
      overlap.add(communicator_, layer_, data_, routing_);
      if (deciding_) chosen.add(communicator_, *deciding_, data_, routing_);
      hidden.add(measure_parts(), overlap.phases.back());
    }
    result.serial_us = core::median(serial.total_us);
    result.overlap_us = core::median(overlap.total_us);
    result.speedup = median_ratio(serial.total_us, overlap.total_us);
    result.combine_speedup = median_ratio(combine_us(serial), combine_us(overlap));
    result.serial = phases_of(serial.phases);
    result.overlap = phases_of(overlap.phases);
    result.dispatch_hidden = core::median(hidden.dispatch);
    result.combine_hidden = core::median(hidden.combine);
    result.parts = {hidden.median(0), hidden.median(1), hidden.median(2), hidden.median(3)};
    result.report = overlap.last;
    result.backlog_us = core::median(overlap.backlog_us);
    result.consumer_idle = core::median(overlap.idle);
    if (!deciding_) return;
    result.chosen = MoeChosen{.us = core::median(chosen.total_us),
                              .speedup = median_ratio(serial.total_us, chosen.total_us),
                              .method = chosen.last.method,
                              .choice = chosen.last.choice};
  }

 private:
  /// Of MoeOverlapIf::kMeasured: after these the faster way stays.
  static constexpr std::int64_t kTrialCalls = 8;

  std::vector<double> measure_parts() {
    const MoeLayer::Parts parts = layer_.measure_parts(data_.weights());
    return slowest(communicator_, {parts.dispatch_gemm_us, parts.dispatch_transfer_us, parts.combine_gemm_us,
                                   parts.combine_transfer_us});
  }

  const MoeRun& run_;
  Communicator& communicator_;
  const MoeRouting& routing_;
  Context context_;
  MoeLayer layer_;
  MoeRankData data_;
  std::optional<MoeLayer> deciding_;
};

/// What runs on one rank; rank 0 fills in the result.
void run_rank(const MoeRun& run, const std::shared_ptr<Communicator>& communicator,
              const std::vector<MoeRouting>& routings, MoeResult& result) {
  MeasuredRank rank(run, communicator, routings[static_cast<std::size_t>(communicator->rank())], result.link);
  MoeResult own;
  rank.check(own);
  rank.measure(own);
  if (communicator->rank() != 0) return;
  own.link = result.link;
  own.waste = result.waste;
  own.paper = result.paper;
  result = std::move(own);
}

void add_waste(const MoeProblem& problem, const MoeCounts& counts, MoeResult& result) {
  const auto add = [](MoeWaste& sum, const MoeWaste& waste) {
    sum.valid_rows += waste.valid_rows;
    sum.computed_rows += waste.computed_rows;
    sum.bands += waste.bands;
    sum.experts += waste.experts;
  };
  for (std::int32_t rank = 0; rank < problem.ranks; ++rank) {
    MoePlanOptions options = moe_plan_options(problem, rank);
    options.transport = MoeTransport::kPut;
    add(result.waste, moe_waste(options, counts));
    options.padding = MoePadding::kPaper;
    add(result.paper, moe_waste(options, counts));
  }
}

/// A link on which the return takes about as long as the second GEMM.
double balanced_gbps(const MoeRun& run, const std::vector<MoeRouting>& routings, const MoeCounts& counts) {
  const MoeProblem& p = run.problem;
  double gemm_us = 0;
  run_ranks(static_cast<int>(p.ranks), {}, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context(communicator, {.num_threads = static_cast<int>(p.threads)});
    MoeLayer layer(context, moe_layer_options(p, MoeTransport::kPut));
    MoeRankData data(p, communicator->rank(), layer.first_expert(), layer.local_experts());
    const MoeRouting& routing = routings[static_cast<std::size_t>(communicator->rank())];
    std::vector<double> us;
    constexpr int kTimes = 5;  // One alone may have met other work.
    for (int i = 0; i < kTimes; ++i) {
      layer.forward(data.x.data(), p.hidden, routing, data.weights(), data.out.data(), p.hidden);
      us.push_back(slowest(*communicator, {layer.measure_parts(data.weights()).combine_gemm_us})[0]);
    }
    if (communicator->rank() == 0) gemm_us = core::median(us);
  });
  std::int64_t most = 0;
  for (std::int32_t rank = 0; rank < p.ranks; ++rank) {
    std::int64_t rows = 0;
    for (const MoeGroup& group : moe_layout(moe_plan_options(p, rank), counts).groups) {
      if (group.owner != rank) rows += group.rows;
    }
    most = std::max(most, rows);
  }
  const double bytes = static_cast<double>(most * p.hidden * size_of(parse_dtype(p.dtype)));
  return gemm_us > 0 ? bytes / gemm_us * 1e-3 : 0;
}

}  // namespace

MoeResult measure_moe(MoeRun& run) {
  const bool job = is_job();
  MoeProblem& p = run.problem;
  if (job) p.ranks = job_size();
  const std::vector<MoeRouting> routings = make_routings(p);
  const MoeCounts counts = counts_of(routings, p.capacity);
  MoeResult result;
  result.link = run.link;
  add_waste(p, counts, result);
  if (job) {
    result.link = {};
    run_rank(run, job_communicator(p.ranks), routings, result);
    return result;
  }
  if (run.link_is_auto && p.ranks > 1) {
    constexpr double kAutoLatencyUs = 10;
    result.link = {.bandwidth_gbps = balanced_gbps(run, routings, counts), .latency_us = kAutoLatencyUs};
  }
  InProcessOptions options;
  options.link = result.link;
  run_ranks(static_cast<int>(p.ranks), options, [&](const std::shared_ptr<Communicator>& communicator) {
    run_rank(run, communicator, routings, result);
  });
  return result;
}

}  // namespace flashoverlap::cli

#include "moe_measure.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "core/median.h"
#include "flashoverlap/call_tuner.h"
#include "flashoverlap/machine_profile.h"
#include "moe_data.h"
#include "moe_gradient_check.h"
#include "moe_series.h"
#include "moe_splits.h"
#include "option_values.h"
#include "process_ranks.h"

namespace flashoverlap::cli {
namespace {

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
               const std::vector<MoeRouting>& routings, const LinkModel& link)
      : run_(run),
        communicator_(*communicator),
        routings_(routings),
        context_(communicator, {.num_threads = static_cast<int>(run.problem.threads)}),
        layer_(context_, layer_options(run, communicator_)),
        data_(run.problem, communicator_.rank(), layer_.first_expert(), layer_.local_experts()) {
    if (run.backward) gradients_.emplace(run.problem, communicator_.rank(), layer_.local_experts());
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
    std::vector<MoeGradientData> gradients;
    std::vector<double> own(3, 0);  // errors of results and gradients, and whether any differ
    std::int64_t checked = 0;
    const auto keep_larger = [](double& largest, double error) {
      if (!(error <= largest)) largest = error;
    };
    const auto call = [&](MoeLayer& layer, Method method) {
      data_.out.poison();
      forward(layer, method);
      keep_larger(own[0], moe_error(p, routings_[rank()], data_, checked));
      outs.push_back(data_.out);
      if (!gradients_ || &layer != &layer_) return;
      gradients_->poison();
      backward(method);
      keep_larger(own[1], moe_gradient_error(p, routings_, communicator_.rank(), layer.first_expert(),
                                             layer.local_experts(), *gradients_, result.gradients_checked));
      gradients.push_back(*gradients_);
    };
    call(layer_, Method::kSerial);
    call(layer_, Method::kOverlap);
    if (deciding_) {
      for (std::int64_t i = 0; i <= kTrialCalls; ++i) call(*deciding_, Method::kOverlap);
    }
    const bool same = std::ranges::all_of(outs, [&](const Matrix& out) { return out == outs[0]; }) &&
                      std::ranges::all_of(gradients, [&](const auto& g) { return g.equals(gradients[0]); });
    own[2] = same ? 0 : 1;
    const std::vector<double> worst = slowest(communicator_, own);
    result.error = worst[0];
    result.checked = checked;
    result.gradient_error = worst[1];
    result.equals_serial = worst[2] == 0;
    result.same_bits_expected = layer_.options().padding == MoePadding::kRagged;
  }

  void measure(MoeResult& result) {
    MoeSeries serial;
    MoeSeries overlap;
    MoeSeries chosen;
    MoeHidden hidden;
    MoeSeries backward_serial;
    MoeSeries backward_overlap;
    MoeHidden backward_hidden;
    for (std::int64_t i = 0; i < run_.iterations; ++i) {
      serial.add(communicator_, [&] { return forward(layer_, Method::kSerial); });
      if (gradients_) backward_serial.add(communicator_, [&] { return backward(Method::kSerial); });
      overlap.add(communicator_, [&] { return forward(layer_, Method::kOverlap); });
      if (gradients_) {
        backward_overlap.add(communicator_, [&] { return backward(Method::kOverlap); });
        backward_hidden.add(slowest(communicator_, layer_.measure_backward_parts()),
                            backward_overlap.calls().back());
      }
      hidden.add(slowest(communicator_, layer_.measure_parts(data_.weights())), overlap.calls().back());
      if (deciding_) chosen.add(communicator_, [&] { return forward(*deciding_, Method::kOverlap); });
    }
    result.forward = pass_of(serial, overlap, hidden);
    if (gradients_) result.backward = pass_of(backward_serial, backward_overlap, backward_hidden);
    result.report = overlap.last();
    result.backlog_us = overlap.median([](const auto& call) { return call.backlog_us; });
    result.consumer_idle = overlap.median([](const auto& call) { return call.consumer_idle; });
    if (!deciding_) return;
    result.chosen = MoeChosen{.us = chosen.median(total_us),
                              .speedup = median_ratio(serial, chosen, total_us),
                              .method = chosen.last().method,
                              .choice = chosen.last().choice};
  }

 private:
  /// Of MoeOverlapIf::kMeasured: after these the faster way stays.
  static constexpr std::int64_t kTrialCalls = 8;

  static double total_us(const MoeSeries::Call& call) { return call.total_us; }

  static MoePass pass_of(const MoeSeries& serial, const MoeSeries& overlap, const MoeHidden& hidden) {
    return {.serial_us = serial.median(total_us),
            .overlap_us = overlap.median(total_us),
            .speedup = median_ratio(serial, overlap, total_us),
            .combine_speedup =
                median_ratio(serial, overlap, [](const auto& call) { return call.phases.combine_us; }),
            .dispatch_hidden = hidden.dispatch(),
            .combine_hidden = hidden.combine(),
            .work_us = overlap.median([](const auto& call) { return call.work_us; }),
            .serial = serial.phases(),
            .overlap = overlap.phases(),
            .parts = hidden.parts()};
  }

  MoeReport forward(MoeLayer& layer, Method method) {
    const std::int64_t hidden = layer.options().hidden;
    return layer.forward(data_.x.data(), hidden, routings_[rank()], data_.weights(), data_.out.data(), hidden,
                         method);
  }

  MoeReport backward(Method method) {
    return layer_.backward(gradients_->by_out.data(), layer_.options().hidden, data_.weights(),
                           gradients_->gradients(), method);
  }

  [[nodiscard]] std::size_t rank() const { return static_cast<std::size_t>(communicator_.rank()); }

  const MoeRun& run_;
  Communicator& communicator_;
  const std::vector<MoeRouting>& routings_;
  Context context_;
  MoeLayer layer_;
  MoeRankData data_;
  std::optional<MoeGradientData> gradients_;  ///< With backward.
  std::optional<MoeLayer> deciding_;
};

/// What runs on one rank; rank 0 fills in the result.
void run_rank(const MoeRun& run, const std::shared_ptr<Communicator>& communicator,
              const std::vector<MoeRouting>& routings, MoeResult& result) {
  MeasuredRank rank(run, communicator, routings, result.link);
  MoeResult own;
  rank.check(own);
  rank.measure(own);
  if (communicator->rank() != 0) return;
  own.link = result.link;
  own.waste = result.waste;
  own.paper = result.paper;
  result = std::move(own);
}

/// Of one rank, on the CPU.
class CpuSplitLayer final : public SplitLayer {
 public:
  CpuSplitLayer(Context& context, const MoeLayerOptions& options, MoeRankData& data,
                const std::vector<const MoeRouting*>& routings)
      : communicator_(context.communicator()), layer_(context, options), data_(data), routings_(routings) {}

  MoeReport call(std::size_t routing) override {
    const std::int64_t hidden = layer_.options().hidden;
    return layer_.forward(data_.x.data(), hidden, *routings_[routing], data_.weights(), data_.out.data(),
                          hidden);
  }
  double time_us(std::size_t routing) override {
    return slowest(communicator_, std::vector<double>{call(routing).phases.total_us()}).front();
  }

 private:
  Communicator& communicator_;
  MoeLayer layer_;
  MoeRankData& data_;
  const std::vector<const MoeRouting*>& routings_;
};

MoeSplits measure_splits_of_rank(const MoeRun& run, const std::shared_ptr<Communicator>& communicator,
                                 const std::vector<const MoeRouting*>& routings) {
  Context context(communicator, {.num_threads = static_cast<int>(run.problem.threads)});
  MoeLayerOptions options = layer_options(run, *communicator);
  const auto rank = communicator->rank();
  const std::int64_t first = first_expert(options.num_experts, communicator->size(), rank);
  const std::int64_t end = first_expert(options.num_experts, communicator->size(), rank + 1);
  MoeRankData data(run.problem, rank, first, end - first);
  return measure_splits(run, [&](const MoeSetting* split) {
    return std::make_unique<CpuSplitLayer>(context, with_split(options, split), data, routings);
  });
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
LinkModel balanced_link(const MoeRun& run, const std::vector<MoeRouting>& routings, const MoeCounts& counts) {
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
      us.push_back(slowest(*communicator, layer.measure_parts(data.weights())).combine_gemm_us);
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
  constexpr double kLatencyUs = 10;
  return {.bandwidth_gbps = gemm_us > 0 ? bytes / gemm_us * 1e-3 : 0, .latency_us = kLatencyUs};
}

}  // namespace

MoeSplits measure_moe_splits(MoeRun& run) {
  const std::vector<std::vector<MoeRouting>> routings = routings_in_turn(run);
  const MoeCounts counts = counts_of(routings.front(), run.problem.capacity);
  InProcessOptions options;
  options.link = run.link;
  if (run.link_is_auto && run.problem.ranks > 1) options.link = balanced_link(run, routings.front(), counts);
  MoeSplits result;
  run_ranks(static_cast<int>(run.problem.ranks), options,
            [&](const std::shared_ptr<Communicator>& communicator) {
              MoeSplits splits =
                  measure_splits_of_rank(run, communicator, routings_of(routings, communicator->rank()));
              if (communicator->rank() == 0) result = std::move(splits);
            });
  return result;
}

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
  if (run.link_is_auto && p.ranks > 1) result.link = balanced_link(run, routings, counts);
  InProcessOptions options;
  options.link = result.link;
  run_ranks(static_cast<int>(p.ranks), options, [&](const std::shared_ptr<Communicator>& communicator) {
    run_rank(run, communicator, routings, result);
  });
  return result;
}

}  // namespace flashoverlap::cli

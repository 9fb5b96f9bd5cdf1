#include "gpu_moe_run.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "core/fail.h"
#include "core/median.h"
#include "cuda/device.h"
#include "flashoverlap/call_tuner.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/machine_profile.h"
#include "gpu_measure.h"
#include "gpu_ranks.h"
#include "moe_data.h"
#include "moe_gradient_check.h"
#include "moe_series.h"
#include "option_values.h"

namespace flashoverlap::cli {
namespace {

void check_run(const MoeRun& run) {
  require_gpu_type(parse_dtype(run.problem.dtype));
}

MoeLayerOptions layer_options(const MoeRun& run) {
  const std::string& transport = run.problem.transport;
  MoeLayerOptions options = moe_layer_options(
      run.problem, transport.empty() ? MoeTransport::kCollective : parse_moe_transport(transport));
  options.adapt = run.adapt;
  constexpr std::int64_t kMostConsumers = 48;
  constexpr std::int64_t kStep = 4;
  options.controller.max_consumers = kMostConsumers;
  options.controller.consumer_step = kStep;
  return options;
}

MoeLayerOptions deciding_options(const MoeRun& run, const LinkModel& link) {
  MoeLayerOptions options = layer_options(run);
  options.overlap_if = parse_moe_overlap_if(run.overlap_if);
  if (options.overlap_if == MoeOverlapIf::kPredicted)
    options.machine = std::make_shared<const MachineProfile>(paced(load_machine_profile(run.machine), link));
  return options;
}

/// One rank's gradients, and their copies on its device.
class GpuGradients {
 public:
  GpuGradients(const MoeProblem& problem, int rank, std::int64_t experts, int device)
      : data_(problem, rank, experts),
        device_(device),
        by_out_(on_device(device, data_.by_out)),
        input_(on_device(device, data_.input)),
        routing_weights_(on_device(device, data_.routing_weights)),
        up_(on_device(device, data_.up)),
        down_(on_device(device, data_.down)) {}

  [[nodiscard]] const void* by_out() const { return by_out_.data(); }
  [[nodiscard]] MoeGradients wanted() const {
    return {.input = input_.data(),
            .input_ld = data_.input.cols(),
            .routing_weights = static_cast<float*>(routing_weights_.data()),
            .up = static_cast<float*>(up_.data()),
            .down = static_cast<float*>(down_.data())};
  }
  void poison() {
    data_.poison();
    write_to(device_, input_, data_.input);
    write_to(device_, routing_weights_, data_.routing_weights);
    write_to(device_, up_, data_.up);
    write_to(device_, down_, data_.down);
  }
  const MoeGradientData& read(Stream& stream) {
    read_from(input_, data_.input, stream);
    read_from(routing_weights_, data_.routing_weights, stream);
    read_from(up_, data_.up, stream);
    read_from(down_, data_.down, stream);
    return data_;
  }

 private:
  MoeGradientData data_;
  int device_;
  cuda::DeviceBuffer by_out_, input_, routing_weights_, up_, down_;
};

/// One rank's layer with its matrices on its device.
class GpuMoeRank {
 public:
  GpuMoeRank(const std::shared_ptr<Communicator>& communicator, const CudaOptions& cuda_options,
             const MoeRun& run, const MoeRouting& routing)
      : problem_(run.problem),
        routing_(routing),
        device_(cuda_options.device),
        scope_(device_),
        context_(communicator, make_cuda_executor(communicator, cuda_options)),
        stream_(make_cuda_stream(cuda_options)),
        layer_(context_, layer_options(run)),
        data_(problem_, communicator->rank(), layer_.first_expert(), layer_.local_experts()),
        x_(on_device(device_, data_.x)),
        up_(on_device(device_, data_.up)),
        down_(on_device(device_, data_.down)),
        out_(on_device(device_, data_.out)) {
    if (run.overlap_if != "always")
      deciding_ = std::make_unique<MoeLayer>(
          context_, deciding_options(run, run.link_is_auto ? LinkModel{} : run.link));
    if (run.backward) gradients_.emplace(problem_, communicator->rank(), layer_.local_experts(), device_);
  }

  /// On a poisoned output, which is then in `data().out`.
  MoeReport run_afresh(Method method) {
    data_.out.poison();
    write_to(device_, out_, data_.out);
    MoeReport report = forward(layer_, method);
    read_from(out_, data_.out, *stream_);
    return report;
  }

  /// After that forward, on poisoned gradients.
  const MoeGradientData& backward_afresh(Method method) {
    gradients_->poison();
    backward(method);
    return gradients_->read(*stream_);
  }

  /// Microseconds of one call, see BatchTimer.
  double time_forward(Method method) {
    return time([&] { last_ = forward(layer_, method); });
  }
  /// Of a layer that decides itself, after its trials.
  double time_deciding() {
    return time([&] { last_ = forward(*deciding_, Method::kOverlap); });
  }
  void try_out() {
    constexpr int kTrialCalls = 8;
    if (deciding_ == nullptr) return;
    for (int i = 0; i <= kTrialCalls; ++i) (void)forward(*deciding_, Method::kOverlap);
  }
  [[nodiscard]] bool decides() const { return deciding_ != nullptr; }
  /// What was decided last: serial calls, too, hear of the calls before them.
  [[nodiscard]] const std::string& adaptation() const { return adaptation_; }
  /// Of the last call that was timed.
  [[nodiscard]] const MoeReport& last() const { return last_; }

  /// One call that waits for the device, with its phases.
  MoeReport run_in_phases(Method method) {
    Timeline timeline;
    return forward(layer_, method, &timeline);
  }
  MoeLayer::Parts measure_parts() { return layer_.measure_parts({.up = up_.data(), .down = down_.data()}); }
  [[nodiscard]] Communicator& communicator() { return context_.communicator(); }

  /// Of the last forward.
  double time_backward(Method method) {
    return time([&] { backward(method); });
  }

  [[nodiscard]] const MoeRankData& data() const { return data_; }
  [[nodiscard]] const MoeLayer& layer() const { return layer_; }

  /// A layer of its own on this rank's matrices.
  class Split final : public SplitLayer {
   public:
    Split(GpuMoeRank& rank, const MoeLayerOptions& options, const std::vector<const MoeRouting*>& routings)
        : rank_(rank), layer_(rank.context_, options), routings_(routings) {}
    MoeReport call(std::size_t routing) override {
      MoeReport report = enqueue(routing);
      rank_.stream_->synchronize();
      return report;
    }
    double time_us(std::size_t routing) override {
      return rank_.time([&] { (void)enqueue(routing); });
    }

   private:
    MoeReport enqueue(std::size_t routing) {
      return rank_.forward(layer_, Method::kOverlap, nullptr, routings_[routing]);
    }
    GpuMoeRank& rank_;
    MoeLayer layer_;
    const std::vector<const MoeRouting*>& routings_;
  };

 private:
  MoeReport forward(MoeLayer& layer, Method method, Timeline* timeline = nullptr,
                    const MoeRouting* routing = nullptr) {
    MoeReport report = layer.forward(x_.data(), problem_.hidden, routing != nullptr ? *routing : routing_,
                                     {.up = up_.data(), .down = down_.data()}, out_.data(), problem_.hidden,
                                     method, timeline, native_handle(*stream_));
    if (!report.adaptation.empty()) adaptation_ = report.adaptation;
    return report;
  }

  void backward(Method method) {
    (void)layer_.backward(gradients_->by_out(), problem_.hidden, {.up = up_.data(), .down = down_.data()},
                          gradients_->wanted(), method);
  }

  double time(const std::function<void()>& call) {
    constexpr int kCalls = 3;
    return timer_.time_us(context_.communicator(), *stream_, kCalls, call);
  }

  const MoeProblem& problem_;
  const MoeRouting& routing_;
  int device_;
  cuda::DeviceScope scope_;
  Context context_;
  std::unique_ptr<Stream> stream_;
  MoeLayer layer_;
  std::unique_ptr<MoeLayer> deciding_;
  MoeReport last_;
  std::string adaptation_;
  MoeRankData data_;
  cuda::DeviceBuffer x_, up_, down_, out_;
  std::optional<GpuGradients> gradients_;
  BatchTimer timer_;
};

/// Calls of one kind, serial and overlapped in turn.
class PassTimes {
 public:
  void add(const std::function<double(Method)>& time) {
    serial_.push_back(time(Method::kSerial));
    overlap_.push_back(time(Method::kOverlap));
    ratio_.push_back(serial_.back() / overlap_.back());
  }
  [[nodiscard]] GpuMoePass medians() const {
    return {core::median(serial_), core::median(overlap_), core::median(ratio_)};
  }

 private:
  std::vector<double> serial_, overlap_, ratio_;
};

/// Each way against float64 and against each other; results of all ranks.
void check_rank(GpuMoeRank& rank, const MoeRun& run, const std::vector<MoeRouting>& routings, int index,
                std::mutex& mutex, GpuMoeResult& result) {
  (void)rank.run_afresh(Method::kSerial);
  const Matrix serial_out = rank.data().out;
  std::optional<MoeGradientData> serial_gradients;
  if (run.backward) serial_gradients = rank.backward_afresh(Method::kSerial);
  const MoeReport report = rank.run_afresh(Method::kOverlap);
  const MoeGradientData* const gradients = run.backward ? &rank.backward_afresh(Method::kOverlap) : nullptr;
  const std::scoped_lock lock(mutex);
  result.error = std::max(result.error, moe_error(run.problem, routings[static_cast<std::size_t>(index)],
                                                  rank.data(), result.checked));
  result.equals_serial = result.equals_serial && rank.data().out == serial_out;
  if (gradients != nullptr) {
    result.gradient_error =
        std::max(result.gradient_error,
                 moe_gradient_error(run.problem, routings, index, rank.layer().first_expert(),
                                    rank.layer().local_experts(), *gradients, result.gradients_checked));
    result.equals_serial = result.equals_serial && gradients->equals(*serial_gradients);
  }
  result.waste.valid_rows += report.waste.valid_rows;
  result.waste.computed_rows += report.waste.computed_rows;
  result.dropped_rows = report.all_dropped_rows;
}

/// Beside serial calls, which it is compared with.
MoeChosen time_deciding(GpuMoeRank& rank, const MoeRun& run) {
  rank.try_out();
  std::vector<double> us, speedup;
  for (std::int64_t i = 0; i < run.iterations; ++i) {
    const double serial_us = rank.time_forward(Method::kSerial);
    us.push_back(rank.time_deciding());
    speedup.push_back(serial_us / us.back());
  }
  return {.us = core::median(us),
          .speedup = core::median(speedup),
          .method = rank.last().method,
          .choice = rank.last().choice};
}

/// Backward is timed by itself: of one forward, again and again.
void time_rank(GpuMoeRank& rank, const MoeRun& run, bool is_first, GpuMoeResult& result) {
  PassTimes forward, backward;
  for (std::int64_t i = 0; i < run.iterations; ++i) {
    forward.add([&](Method method) { return rank.time_forward(method); });
    if (run.backward) backward.add([&](Method method) { return rank.time_backward(method); });
  }
  std::optional<MoeChosen> chosen;
  if (rank.decides()) chosen = time_deciding(rank, run);
  if (!is_first) return;
  result.setting = rank.last().setting;
  result.adaptation = rank.adaptation();
  result.forward = forward.medians();
  if (run.backward) result.backward = backward.medians();
  result.chosen = chosen;
}

/// Each GEMM with its transfers, all ranks beginning together, and both alone.
void measure_phases(GpuMoeRank& rank, const MoeRun& run, bool is_first, GpuMoeResult& result) {
  const auto parts_of = [&](Method method) {
    MoeReport report = rank.run_in_phases(method);
    const MoeLayer::Parts parts = slowest(rank.communicator(), rank.measure_parts());
    report.phases = {.dispatch_us = parts.dispatch_us, .combine_us = parts.combine_us};
    return std::pair(report, parts);
  };
  MoeSeries serial, overlap;
  MoeHidden hidden;
  for (std::int64_t i = 0; i < run.iterations; ++i) {
    serial.add(rank.communicator(), [&] { return parts_of(Method::kSerial).first; });
    MoeLayer::Parts parts;
    overlap.add(rank.communicator(), [&] {
      const auto [report, overlapped_parts] = parts_of(Method::kOverlap);
      parts = overlapped_parts;
      return report;
    });
    hidden.add(parts, overlap.calls().back());
  }
  if (!is_first) return;
  const auto combine_us = [](const MoeSeries::Call& call) { return call.phases.combine_us; };
  result.phases = {.serial = serial.phases(),
                   .overlap = overlap.phases(),
                   .combine_speedup = median_ratio(serial, overlap, combine_us),
                   .dispatch_hidden = hidden.dispatch(),
                   .combine_hidden = hidden.combine(),
                   .parts = hidden.parts(),
                   .backlog_us = overlap.median([](const auto& call) { return call.backlog_us; }),
                   .consumer_idle = overlap.median([](const auto& call) { return call.consumer_idle; })};
}

}  // namespace

MoeSplits measure_moe_splits_on_gpus(MoeRun& run, const GpuOptions& gpu) {
  check_run(run);
  const std::vector<std::vector<MoeRouting>> routings = routings_in_turn(run);
  const GpuRanks ranks(run.problem.ranks, gpu, run.link_is_auto ? LinkModel{} : run.link);
  MoeSplits result;
  run_ranks(static_cast<int>(run.problem.ranks), {}, [&](const std::shared_ptr<Communicator>& control) {
    ranks.run(control, [&](const std::shared_ptr<Communicator>& communicator, const CudaOptions& options) {
      const std::vector<const MoeRouting*> own = routings_of(routings, control->rank());
      GpuMoeRank rank(communicator, options, run, *own.front());
      MoeSplits splits = measure_splits(run, [&](const MoeSetting* split) {
        return std::make_unique<GpuMoeRank::Split>(rank, with_split(layer_options(run), split), own);
      });
      if (control->rank() == 0) result = std::move(splits);
    });
  });
  return result;
}

GpuMoeResult measure_moe_on_gpus(MoeRun& run, const GpuOptions& gpu) {
  check_run(run);
  const std::vector<MoeRouting> routings = make_routings(run.problem);
  const GpuRanks ranks(run.problem.ranks, gpu, run.link_is_auto ? LinkModel{} : run.link);
  GpuMoeResult result;
  result.communicator = ranks.text();
  result.transport = layer_options(run).transport;
  std::mutex mutex;
  run_ranks(static_cast<int>(run.problem.ranks), {}, [&](const std::shared_ptr<Communicator>& control) {
    ranks.run(control, [&](const std::shared_ptr<Communicator>& communicator, const CudaOptions& options) {
      GpuMoeRank rank(communicator, options, run, routings[static_cast<std::size_t>(control->rank())]);
      check_rank(rank, run, routings, control->rank(), mutex, result);
      time_rank(rank, run, control->rank() == 0, result);
      measure_phases(rank, run, control->rank() == 0, result);
    });
  });
  return result;
}

}  // namespace flashoverlap::cli

#include "gpu_moe_run.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "core/fail.h"
#include "core/median.h"
#include "cuda/device.h"
#include "flashoverlap/in_process.h"
#include "gpu_measure.h"
#include "gpu_ranks.h"
#include "moe_data.h"
#include "moe_gradient_check.h"
#include "option_values.h"

namespace flashoverlap::cli {
namespace {

void check_run(const MoeRun& run) {
  const auto refuse = [](bool is_asked, const char* what) {
    if (is_asked) core::fail(ErrorKind::kUnsupported, "--backend cuda has no {} yet", what);
  };
  refuse(run.adapt, "--adapt");
  refuse(run.overlap_if != "always", "--overlap-if but always");
  refuse(run.problem.transport == "put", "--transport put");
  require_gpu_type(parse_dtype(run.problem.dtype));
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
        layer_(context_, moe_layer_options(problem_, MoeTransport::kCollective)),
        data_(problem_, communicator->rank(), layer_.first_expert(), layer_.local_experts()),
        x_(on_device(device_, data_.x)),
        up_(on_device(device_, data_.up)),
        down_(on_device(device_, data_.down)),
        out_(on_device(device_, data_.out)) {
    if (run.backward) gradients_.emplace(problem_, communicator->rank(), layer_.local_experts(), device_);
  }

  /// On a poisoned output, which is then in `data().out`.
  MoeReport run_afresh(Method method) {
    data_.out.poison();
    write_to(device_, out_, data_.out);
    MoeReport report = forward(method);
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
    return time([&] { (void)forward(method); });
  }
  /// Of the last forward.
  double time_backward(Method method) {
    return time([&] { backward(method); });
  }

  [[nodiscard]] const MoeRankData& data() const { return data_; }
  [[nodiscard]] const MoeLayer& layer() const { return layer_; }

 private:
  MoeReport forward(Method method) {
    return layer_.forward(x_.data(), problem_.hidden, routing_, {.up = up_.data(), .down = down_.data()},
                          out_.data(), problem_.hidden, method, nullptr, native_handle(*stream_));
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

/// Backward is timed by itself: of one forward, again and again.
void time_rank(GpuMoeRank& rank, const MoeRun& run, bool is_first, GpuMoeResult& result) {
  PassTimes forward, backward;
  for (std::int64_t i = 0; i < run.iterations; ++i) {
    forward.add([&](Method method) { return rank.time_forward(method); });
    if (run.backward) backward.add([&](Method method) { return rank.time_backward(method); });
  }
  if (!is_first) return;
  result.forward = forward.medians();
  if (run.backward) result.backward = backward.medians();
}

}  // namespace

GpuMoeResult measure_moe_on_gpus(MoeRun& run, const GpuOptions& gpu) {
  check_run(run);
  const std::vector<MoeRouting> routings = make_routings(run.problem);
  const GpuRanks ranks(run.problem.ranks, gpu, run.link_is_auto ? LinkModel{} : run.link);
  GpuMoeResult result;
  result.communicator = ranks.text();
  std::mutex mutex;
  run_ranks(static_cast<int>(run.problem.ranks), {}, [&](const std::shared_ptr<Communicator>& control) {
    ranks.run(control, [&](const std::shared_ptr<Communicator>& communicator, const CudaOptions& options) {
      GpuMoeRank rank(communicator, options, run, routings[static_cast<std::size_t>(control->rank())]);
      check_rank(rank, run, routings, control->rank(), mutex, result);
      time_rank(rank, run, control->rank() == 0, result);
    });
  });
  return result;
}

}  // namespace flashoverlap::cli

#include "gpu_moe_run.h"

#include <algorithm>
#include <mutex>

#include "core/fail.h"
#include "core/median.h"
#include "cuda/device.h"
#include "flashoverlap/in_process.h"
#include "gpu_measure.h"
#include "gpu_ranks.h"
#include "moe_data.h"
#include "option_values.h"

namespace flashoverlap::cli {
namespace {

void check_run(const MoeRun& run) {
  const auto refuse = [](bool is_asked, const char* what) {
    if (is_asked) core::fail(ErrorKind::kUnsupported, "--backend cuda has no {} yet", what);
  };
  refuse(run.backward, "--backward");
  refuse(run.adapt, "--adapt");
  refuse(run.overlap_if != "always", "--overlap-if but always");
  refuse(run.problem.transport == "put", "--transport put");
  require_gpu_type(parse_dtype(run.problem.dtype));
}

/// One rank's layer with its matrices on its device.
class GpuMoeRank {
 public:
  GpuMoeRank(const std::shared_ptr<Communicator>& communicator, const CudaOptions& cuda_options,
             const MoeProblem& problem, const MoeRouting& routing)
      : problem_(problem),
        routing_(routing),
        device_(cuda_options.device),
        scope_(device_),
        context_(communicator, make_cuda_executor(communicator, cuda_options)),
        stream_(make_cuda_stream(cuda_options)),
        layer_(context_, moe_layer_options(problem, MoeTransport::kCollective)),
        data_(problem, communicator->rank(), layer_.first_expert(), layer_.local_experts()),
        x_(on_device(device_, data_.x)),
        up_(on_device(device_, data_.up)),
        down_(on_device(device_, data_.down)),
        out_(on_device(device_, data_.out)) {}

  /// On a poisoned output, which is then in `data().out`.
  MoeReport run_afresh(Method method) {
    data_.out.poison();
    write_to(device_, out_, data_.out);
    MoeReport report = forward(method);
    read_from(out_, data_.out, *stream_);
    return report;
  }

  /// Microseconds of one call, see BatchTimer.
  double time(Method method) {
    constexpr int kCalls = 3;
    return timer_.time_us(context_.communicator(), *stream_, kCalls, [&] { (void)forward(method); });
  }

  [[nodiscard]] const MoeRankData& data() const { return data_; }

 private:
  MoeReport forward(Method method) {
    return layer_.forward(x_.data(), problem_.hidden, routing_, {.up = up_.data(), .down = down_.data()},
                          out_.data(), problem_.hidden, method, nullptr, native_handle(*stream_));
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
  BatchTimer timer_;
};

void measure_rank(GpuMoeRank& rank, const MoeRun& run, const MoeRouting& routing, bool is_first,
                  std::mutex& mutex, GpuMoeResult& result) {
  (void)rank.run_afresh(Method::kSerial);
  const Matrix serial_out = rank.data().out;
  const MoeReport report = rank.run_afresh(Method::kOverlap);
  {
    const std::scoped_lock lock(mutex);
    result.error = std::max(result.error, moe_error(run.problem, routing, rank.data(), result.checked));
    result.equals_serial = result.equals_serial && rank.data().out == serial_out;
    result.waste.valid_rows += report.waste.valid_rows;
    result.waste.computed_rows += report.waste.computed_rows;
    result.dropped_rows = report.all_dropped_rows;
  }
  std::vector<double> serial, overlap, ratio;
  for (std::int64_t i = 0; i < run.iterations; ++i) {
    serial.push_back(rank.time(Method::kSerial));
    overlap.push_back(rank.time(Method::kOverlap));
    ratio.push_back(serial.back() / overlap.back());
  }
  if (!is_first) return;
  result.serial_us = core::median(serial);
  result.overlap_us = core::median(overlap);
  result.speedup = core::median(ratio);
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
      const auto index = static_cast<std::size_t>(control->rank());
      GpuMoeRank rank(communicator, options, run.problem, routings[index]);
      measure_rank(rank, run, routings[index], index == 0, mutex, result);
    });
  });
  return result;
}

}  // namespace flashoverlap::cli

#include "flashoverlap/cuda_context.h"
#include "gpu_measure.h"
#include "gpu_ranks.h"
#include "layer_measure.h"
#include "layers/cuda_place.h"

/// `flashoverlap run --backend cuda` for whole layers.
namespace flashoverlap::cli {
namespace {

/// One rank's layer with its place.
struct GpuLayer {
  GpuLayer(const std::shared_ptr<Communicator>& communicator, const CudaOptions& options, Stream& stream,
           const LayerRun& run)
      : context(communicator, make_cuda_executor(communicator, options)),
        place(layers::make_cuda_place(context, options, stream, parse_dtype(run.dtype))),
        layer(run.make_layer(*place)) {}

  Context context;
  std::unique_ptr<layers::Place> place;
  std::unique_ptr<layers::Layer> layer;
};

void measure_rank(const std::shared_ptr<Communicator>& communicator, const CudaOptions& options,
                  const LayerRun& run, SharedLayer& shared) {
  const cuda::DeviceScope scope(options.device);
  const std::unique_ptr<Stream> stream = make_cuda_stream(options);
  const GpuLayer persistent(communicator, options, *stream, run);
  std::optional<GpuLayer> decomposed;
  if (run.gpu->decomposed) {
    CudaOptions own = options;
    own.form = GemmForm::kDecomposed;
    decomposed.emplace(communicator, own, *stream, run);
  }
  BatchTimer timer;
  // Of several calls back to back, see BatchTimer.
  const auto time_us = [&](const std::function<void()>& call) {
    constexpr int kCalls = 5;
    return timer.time_us(*communicator, *stream, kCalls, call);
  };
  measure_layer_rank(
      {.layer = *persistent.layer, .decomposed = decomposed ? decomposed->layer.get() : nullptr},
      {.time_us = time_us, .meet = [&] { meet(*communicator); }}, communicator->rank(), run, shared);
}

}  // namespace

LayerResult measure_layer_on_gpus(const LayerRun& run) {
  require_gpu_type(parse_dtype(run.dtype));
  const LinkModel link = run.link.is_auto ? LinkModel{} : run.link.model;
  const GpuRanks ranks(run.ranks, *run.gpu, link);
  SharedLayer shared;
  shared.result.link = link;
  shared.result.machine = "cuda backend, " + ranks.text();
  run_ranks(static_cast<int>(run.ranks), {}, [&](const std::shared_ptr<Communicator>& control) {
    ranks.run(control, [&](const std::shared_ptr<Communicator>& communicator, const CudaOptions& options) {
      measure_rank(communicator, options, run, shared);
    });
  });
  return std::move(shared.result);
}

}  // namespace flashoverlap::cli

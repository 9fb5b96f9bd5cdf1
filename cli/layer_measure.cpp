#include "layer_measure.h"

#include <vector>

#include "core/median.h"

namespace flashoverlap::cli {
namespace {

/// Microseconds of each iteration.
struct LayerTimes {
  std::vector<double> serial, sliced, overlap, decomposed, computation, communication;
};

LayerTimes time_layer(const LayerForms& forms, const TimeCall& time_us, std::int64_t iterations) {
  LayerTimes times;
  layers::Layer& layer = forms.layer;
  for (std::int64_t i = 0; i < iterations; ++i) {
    const auto timed = [&](std::vector<double>& to, Method method, Mode mode) {
      to.push_back(time_us([&] { layer.run(method, mode, nullptr); }));
    };
    timed(times.serial, Method::kSerial, Mode::kRun);
    if (layer.has_sliced()) timed(times.sliced, Method::kSliced, Mode::kRun);
    timed(times.overlap, Method::kOverlap, Mode::kRun);
    if (forms.decomposed != nullptr) times.decomposed.push_back(time_us([&] { forms.decomposed->run(); }));
    timed(times.computation, Method::kOverlap, Mode::kPlainGemm);
    timed(times.communication, Method::kSerial, Mode::kCommunicationOnly);
  }
  return times;
}

void keep_medians(const LayerTimes& times, LayerResult& result) {
  result.serial_us = core::median(times.serial);
  result.serial_exposed_us = exposed_us(times.serial, times.computation);
  if (!times.sliced.empty()) {
    result.sliced_us = core::median(times.sliced);
    result.sliced_exposed_us = exposed_us(times.sliced, times.computation);
  }
  if (!times.decomposed.empty()) {
    result.decomposed_us = core::median(times.decomposed);
    result.decomposed_exposed_us = exposed_us(times.decomposed, times.computation);
  }
  result.overlap_us = core::median(times.overlap);
  result.overlap_exposed_us = exposed_us(times.overlap, times.computation);
  result.computation_us = core::median(times.computation);
  result.communication_us = core::median(times.communication);
}

/// Calls it on poisoned outputs, on all ranks together, and compares with the whole layer.
void check(layers::Layer& layer, Method method, const LayerClock& clock, SharedLayer& shared,
           Timeline* timeline = nullptr) {
  layer.poison();
  clock.meet();
  layer.run(method, Mode::kRun, timeline);
  const double error = layer.error(method);
  const std::lock_guard lock(shared.mutex);
  LayerResult& result = shared.result;
  result.largest_error = layer.largest_error();
  result.correct = result.correct && error <= result.largest_error;
  if (!(error <= result.error)) result.error = error;
}

}  // namespace

void measure_layer_rank(const LayerForms& forms, const LayerClock& clock, int rank, const LayerRun& run,
                        SharedLayer& shared) {
  layers::Layer& layer = forms.layer;
  check(layer, Method::kSerial, clock, shared);
  const layers::Values serial_output = layer.output();
  const LayerTimes times = time_layer(forms, clock.time_us, run.iterations);
  if (forms.decomposed != nullptr) check(*forms.decomposed, Method::kOverlap, clock, shared);
  if (layer.has_sliced()) check(layer, Method::kSliced, clock, shared);
  Timeline timeline;
  check(layer, Method::kOverlap, clock, shared, &timeline);
  const bool same = layer.output() == serial_output;
  const std::lock_guard lock(shared.mutex);
  LayerResult& result = shared.result;
  result.equals_serial = result.equals_serial && same;
  result.timeline.spans.insert(result.timeline.spans.end(), timeline.spans.begin(), timeline.spans.end());
  if (rank == 0) keep_medians(times, result);
}

}  // namespace flashoverlap::cli

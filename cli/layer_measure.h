#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "flashoverlap/operators.h"
#include "flashoverlap/timeline.h"
#include "gpu_options.h"
#include "layers/layer.h"
#include "paced_run.h"

/// What `flashoverlap run` measures of whole layers.
namespace flashoverlap::cli {

using MakeLayer =
    std::function<std::unique_ptr<layers::Layer>(layers::Place&, std::uint64_t seed, const BaselineOptions&)>;

struct LayerRun {
  std::string name;
  std::string shape;  ///< As text; filled in after parsing.
  std::int64_t ranks = 2;
  std::string dtype = "f32";
  std::int64_t threads = 0;
  std::int64_t iterations = 5;
  std::int64_t baseline_slices = 4;  ///< 0 where there is no such baseline.
  LinkChoice link;
  std::shared_ptr<GpuOptions> gpu = std::make_shared<GpuOptions>();
  std::string trace_path;
  bool json = false;
  std::uint64_t seed = 1;
  MakeLayer make;

  [[nodiscard]] std::unique_ptr<layers::Layer> make_layer(layers::Place& place) const {
    return make(place, seed, {.num_slices = baseline_slices});
  }
};

struct LayerResult {
  std::string machine;  ///< "cpu backend, 1 compute thread per rank"
  LinkModel link;
  double computation_us = 0;  ///< Medians of the slowest rank's time.
  double communication_us = 0;
  double serial_us = 0;
  double serial_exposed_us = 0;
  std::optional<double> sliced_us;
  double sliced_exposed_us = 0;
  double overlap_us = 0;
  double overlap_exposed_us = 0;
  std::optional<double> decomposed_us;  ///< On GPUs, with GpuOptions::decomposed.
  double decomposed_exposed_us = 0;
  double error = 0;  ///< The largest of any method's.
  double largest_error = 0;
  bool correct = true;
  bool equals_serial = true;
  int threads = 0;  ///< Compute threads of each rank; on GPUs 0.
  Timeline timeline;

  [[nodiscard]] double share_of(double exposed_us) const {
    return communication_us > 0 ? exposed_us / communication_us : 0;
  }
};

/// What the ranks of one run fill in together.
struct SharedLayer {
  LayerResult result;
  std::mutex mutex;
};

/// Microseconds of one call, the slowest rank's. Collective.
using TimeCall = std::function<double(const std::function<void()>& call)>;
/// How calls are timed, and how ranks wait for each other before one that is checked. Collective.
struct LayerClock {
  TimeCall time_us;
  std::function<void()> meet;
};

/// The layer, and the same in the decomposed form (GemmForm); null where that is not measured.
struct LayerForms {
  layers::Layer& layer;
  layers::Layer* decomposed = nullptr;
};

/// Checks all methods on poisoned outputs, and measures them in turn; medians are those of rank 0.
void measure_layer_rank(const LayerForms& forms, const LayerClock& clock, int rank, const LayerRun& run,
                        SharedLayer& shared);

/// As on the CPU, on GPUs. Error(kUnsupported) in a build without CUDA, where there is no device, and for
/// f32.
LayerResult measure_layer_on_gpus(const LayerRun& run);

}  // namespace flashoverlap::cli

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "flashoverlap/call_tuner.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/operators.h"
#include "flashoverlap/timeline.h"
#include "gpu_options.h"
#include "paced_run.h"
#include "sliced_data.h"
#include "tuning_options.h"

/// What `flashoverlap run` measures of operators whose data travels in slices.
namespace flashoverlap::cli {

struct SlicedRun {
  std::int64_t iterations = 5;
  TuningOptions tuning;
  LinkChoice link;
  std::shared_ptr<GpuOptions> gpu = std::make_shared<GpuOptions>();
  std::string trace_path;
  bool json = false;
};

struct SlicedResult {
  std::string machine;  ///< "cpu backend, 1 compute thread per rank"
  LinkModel link;
  double gemm_us = 0;  ///< Medians of the slowest rank's time.
  double communication_us = 0;
  double serial_us = 0;
  double serial_exposed_us = 0;
  double sliced_us = 0;
  double sliced_exposed_us = 0;
  double overlap_us = 0;
  double overlap_exposed_us = 0;
  std::optional<double> decomposed_us;  ///< On GPUs, with GpuOptions::decomposed.
  double decomposed_exposed_us = 0;
  TunedCall parts;  ///< Where the parts of slices come from.
  double max_error = 0;
  std::string wrong;  ///< Empty: correct.
  bool equals_serial = true;
  int threads = 0;  ///< Compute threads of each rank; on GPUs 0.
  Timeline timeline;

  /// Of a slice, communication over computation, as it was in this run: the link is paced to 0.9 by GEMMs
  /// that ran before, and a machine whose speed changes makes it another. Above 1 the difference must show.
  [[nodiscard]] double slice_ratio(std::int64_t ranks) const;
  [[nodiscard]] double share_of(double exposed_us) const {
    return communication_us > 0 ? exposed_us / communication_us : 0;
  }
};

/// One rank's operator with its matrices, wherever they are.
class SlicedCalls {
 public:
  SlicedCalls() = default;
  SlicedCalls(const SlicedCalls&) = delete;
  SlicedCalls& operator=(const SlicedCalls&) = delete;
  virtual ~SlicedCalls() = default;

  /// The slowest rank's time of one call. Collective.
  virtual double time_us(Method method, Mode mode) = 0;
  /// Runs on a poisoned output and returns it. Collective.
  virtual const Matrix& run_afresh(Method method, Timeline* timeline) = 0;
  /// The same of the overlapped method in its decomposed form; nothing where that is not measured.
  virtual std::optional<double> time_decomposed_us() { return std::nullopt; }
  virtual const Matrix* run_decomposed_afresh() { return nullptr; }
  [[nodiscard]] virtual const SlicedData& data() const = 0;
};

/// What the ranks of one run fill in together.
struct SharedSliced {
  SlicedResult result;
  std::mutex mutex;
};

std::unique_ptr<GemmOperator> make_sliced_operator(Context& context, const SlicedProblem& problem);

/// "as few as leave no tail", or what was given.
std::string given_parts(const SlicedProblem& problem);

/// Checks all methods, and measures them in turn; medians are those of rank 0. `sums`: of collectives.
void measure_sliced_rank(SlicedCalls& calls, int rank, const SlicedRun& run, SumRounding sums,
                         SharedSliced& shared);

/// As on the CPU, on GPUs. Error(kUnsupported) in a build without CUDA, where there is no device, and for
/// what GPUs cannot do yet.
SlicedResult measure_sliced_on_gpus(const SlicedProblem& problem, const SlicedRun& run);

}  // namespace flashoverlap::cli

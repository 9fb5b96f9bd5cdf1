#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flashoverlap/call_tuner.h"
#include "flashoverlap/in_process.h"
#include "problem_options.h"
#include "result_check.h"

/// What `flashoverlap run` measures.
namespace flashoverlap::cli {

struct RunOptions {
  ProblemOptions problem;
  bool link_is_auto = true;  ///< Paced such that the whole communication takes as long as the GEMM alone.
  LinkModel link;  ///< When not auto. Bandwidth 0: not paced, transfers take what copying memory takes.
  std::int64_t iterations = 5;
  /// Makes what chooses tile and partition where the problem leaves them open, once the link is known and,
  /// where it is paced, the GEMM alone has been timed; may be null.
  std::function<std::shared_ptr<const CallTuner>(const LinkModel&, const std::optional<GemmSample>&)>
      tuner_for;
};

/// Medians over the iterations, each of the time from the first rank's start to the last rank's end.
struct Times {
  double gemm_us = 0;           ///< The GEMM alone: all tiles, no communication.
  double communication_us = 0;  ///< The serial method's transfers alone.
  double serial_us = 0;
  double overlap_us = 0;
  std::optional<double> sliced_us = std::nullopt;      ///< The baseline in slices, where the problem has one.
  std::optional<double> decomposed_us = std::nullopt;  ///< On GPUs, with GpuOptions::decomposed.
  /// Exposed communication: see exposed_us in paced_run.h.
  double serial_exposed_us = 0;
  double overlap_exposed_us = 0;
  double sliced_exposed_us = 0;
  double decomposed_exposed_us = 0;
};

struct RunResult {
  std::vector<OverlapPlan> plans;  ///< Of the overlapped method, one per rank.
  LinkModel link;
  Times times;
  CheckResult check;
  bool equals_serial = true;  ///< Overlapped and serial results have the same bits on every rank.
  int threads = 0;            ///< Compute threads of each rank; on GPUs 0.
  std::string backend = "cpu";
  std::string communicator = "in-process";
  std::optional<OverlapMethod> method =
      std::nullopt;  ///< Where the problem has one: what it came to, never kAuto.
  TunedCall choice;  ///< Where tile and partition come from; filled in by the command.
  Timeline overlap;  ///< Of the last iteration, all ranks.
  Timeline serial;
};

/// Runs the operator on ranks that are threads of this process: first once each way, checked; then
/// `iterations` times each way in turn, so that whatever else the machine does falls on all of them alike;
/// the last results are checked too. Throws Error.
RunResult measure(const RunOptions& options);

}  // namespace flashoverlap::cli

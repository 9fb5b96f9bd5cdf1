#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "run_measure.h"

/// What the ranks' threads of one `flashoverlap run` share, on CPUs and on GPUs, and how their results are
/// judged.
namespace flashoverlap::cli {

struct SharedRun {
  Routing routing;
  std::vector<Inputs> inputs;
  std::unique_ptr<ResultCheck> check;
  std::mutex mutex;  ///< Guards what run_checked merges into result.
  RunResult result;
};

inline void append(const Timeline& from, Timeline& to) {
  to.spans.insert(to.spans.end(), from.spans.begin(), from.spans.end());
}

/// Runs serial and overlapped once, checks both, keeps the worse. Timelines are kept when `keep_timelines`.
/// `Rank` has `const Matrix& run_afresh(Method, Timeline*)`: one call on a poisoned output.
template <typename Rank>
void run_checked(Rank& run, int rank, SharedRun& shared, bool keep_timelines) {
  Timeline serial;
  Timeline overlap;
  const Matrix serial_out = run.run_afresh(Method::kSerial, keep_timelines ? &serial : nullptr);
  const Matrix& overlap_out = run.run_afresh(Method::kOverlap, keep_timelines ? &overlap : nullptr);
  CheckResult check = shared.check->check(rank, overlap_out);
  const CheckResult serial_check = shared.check->check(rank, serial_out);
  if (!serial_check.correct() && check.correct()) check.wrong = "serial method: " + serial_check.wrong;

  const std::lock_guard lock(shared.mutex);
  shared.result.check.merge(check);
  shared.result.equals_serial = shared.result.equals_serial && serial_out == overlap_out;
  append(serial, shared.result.serial);
  append(overlap, shared.result.overlap);
}

}  // namespace flashoverlap::cli

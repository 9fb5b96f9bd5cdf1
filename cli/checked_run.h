#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
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

/// RunResult::method of a problem with this operator.
inline std::optional<OverlapMethod> method_of(const ProblemOptions& problem, const GemmOperator& op) {
  const auto* reduce_scatter = dynamic_cast<const GemmReduceScatter*>(&op);
  if (!problem.method || reduce_scatter == nullptr) return std::nullopt;
  return reduce_scatter->method();
}

/// Runs serial and overlapped once, and in slices where `has_sliced`, checks all, keeps the worst. Timelines
/// are kept when `keep_timelines`.
/// `Rank` has `const Matrix& run_afresh(Method, Timeline*)`: one call on a poisoned output.
template <typename Rank>
void run_checked(Rank& run, int rank, SharedRun& shared, bool keep_timelines, bool has_sliced = false) {
  Timeline serial;
  Timeline overlap;
  std::string sliced_wrong;
  if (has_sliced) sliced_wrong = shared.check->check(rank, run.run_afresh(Method::kSliced, nullptr)).wrong;
  const Matrix serial_out = run.run_afresh(Method::kSerial, keep_timelines ? &serial : nullptr);
  const Matrix& overlap_out = run.run_afresh(Method::kOverlap, keep_timelines ? &overlap : nullptr);
  CheckResult check = shared.check->check(rank, overlap_out);
  const CheckResult serial_check = shared.check->check(rank, serial_out);
  if (!serial_check.correct() && check.correct()) check.wrong = "serial method: " + serial_check.wrong;
  if (!sliced_wrong.empty() && check.correct()) check.wrong = "in slices: " + sliced_wrong;

  const std::lock_guard lock(shared.mutex);
  shared.result.check.merge(check);
  shared.result.equals_serial = shared.result.equals_serial && serial_out == overlap_out;
  append(serial, shared.result.serial);
  append(overlap, shared.result.overlap);
}

}  // namespace flashoverlap::cli

#include "sliced_measure.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/fail.h"
#include "core/median.h"

namespace flashoverlap::cli {
namespace {

void check_rank(SlicedCalls& calls, SumRounding sums, SharedSliced& shared) {
  const Matrix serial_out = calls.run_afresh(Method::kSerial, nullptr);
  double error = 0;
  const Matrix& sliced_out = calls.run_afresh(Method::kSliced, nullptr);
  std::string wrong = calls.data().check(sliced_out, Method::kSliced, sums, error);
  Timeline timeline;
  const Matrix& out = calls.run_afresh(Method::kOverlap, &timeline);
  if (wrong.empty()) wrong = calls.data().check(out, Method::kOverlap, SumRounding::kOnce, error);
  const bool equals_serial = out == serial_out;
  if (const Matrix* const decomposed = calls.run_decomposed_afresh();
      decomposed != nullptr && wrong.empty()) {
    wrong = calls.data().check(*decomposed, Method::kOverlap, SumRounding::kOnce, error);
    if (!wrong.empty()) wrong = "decomposed: " + wrong;
  }
  const std::lock_guard lock(shared.mutex);
  SlicedResult& result = shared.result;
  if (result.wrong.empty()) result.wrong = wrong;
  result.max_error = std::max(result.max_error, error);
  result.equals_serial = result.equals_serial && equals_serial;
  result.timeline.spans.insert(result.timeline.spans.end(), timeline.spans.begin(), timeline.spans.end());
}

}  // namespace

double SlicedResult::slice_ratio(std::int64_t ranks) const {
  if (ranks < 2 || gemm_us <= 0) return 0;
  const auto world = static_cast<double>(ranks);
  return communication_us / (world - 1) / (gemm_us / world);
}

std::unique_ptr<GemmOperator> make_sliced_operator(Context& context, const SlicedProblem& p) {
  const BaselineOptions baseline{.num_slices = p.baseline_slices};
  const GemmOptions gemm = gemm_options(p);
  const SliceOptions slices = slice_options(p);
  switch (p.op) {
    case SlicedOp::kAllGatherGemm:
      return std::make_unique<AllGatherGemm>(context, gemm, slices, baseline);
    case SlicedOp::kShardedWeight:
      return std::make_unique<ShardedWeightGemm>(context, gemm, slices, baseline);
    case SlicedOp::kReduceScatter:  // run_measure.cpp has it
    case SlicedOp::kGradient:
      return std::make_unique<GradientReduceScatter>(context, gemm, slices, baseline);
    case SlicedOp::kHeads:
      return std::make_unique<GemmAllToAll>(context, gemm, head_slices(p), baseline);
    case SlicedOp::kFromHeads:
      return std::make_unique<AllToAllGemm>(context, gemm, head_slices(p), baseline);
  }
  core::fail(ErrorKind::kInternal, "operator {} is not known here", static_cast<int>(p.op));
}

std::string given_parts(const SlicedProblem& p) {
  std::string text = p.parts > 0 ? fmt::format("{}, given", p.parts) : "as few as leave no tail";
  if (p.send_channels > 0) text += fmt::format(", {} slices at a time, given", p.send_channels);
  return text;
}

void measure_sliced_rank(SlicedCalls& calls, int rank, const SlicedRun& run, SumRounding sums,
                         SharedSliced& shared) {
  std::vector<double> gemm, communication, serial, sliced, overlap, decomposed;
  for (std::int64_t i = 0; i < run.iterations; ++i) {
    serial.push_back(calls.time_us(Method::kSerial, Mode::kRun));
    sliced.push_back(calls.time_us(Method::kSliced, Mode::kRun));
    overlap.push_back(calls.time_us(Method::kOverlap, Mode::kRun));
    if (const std::optional<double> us = calls.time_decomposed_us()) decomposed.push_back(*us);
    gemm.push_back(calls.time_us(Method::kOverlap, Mode::kPlainGemm));
    communication.push_back(calls.time_us(Method::kSerial, Mode::kCommunicationOnly));
  }
  check_rank(calls, sums, shared);
  if (rank != 0) return;
  const std::lock_guard lock(shared.mutex);
  SlicedResult& result = shared.result;
  result.gemm_us = core::median(gemm);
  result.communication_us = core::median(communication);
  result.serial_us = core::median(serial);
  result.serial_exposed_us = exposed_us(serial, gemm);
  result.sliced_us = core::median(sliced);
  result.sliced_exposed_us = exposed_us(sliced, gemm);
  result.overlap_us = core::median(overlap);
  result.overlap_exposed_us = exposed_us(overlap, gemm);
  if (decomposed.empty()) return;
  result.decomposed_us = core::median(decomposed);
  result.decomposed_exposed_us = exposed_us(decomposed, gemm);
}

}  // namespace flashoverlap::cli

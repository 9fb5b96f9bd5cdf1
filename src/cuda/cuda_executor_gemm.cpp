// The GEMM of a call: one launch, or a piece for each slice that arrives or leaves, with the rows of A that
// the caller makes for it.
#include <fmt/format.h>

#include "check.h"
#include "cuda_call.h"

namespace flashoverlap::cuda {

/// A call's GEMM as it is cut, and where it goes.
struct CudaExecutor::Pieces {
  const std::vector<LaunchRange>& ranges;
  const PreparedGemms& gemms;  ///< One for each.
  Cut cut;
  cudaStream_t stream;
};

cudaStream_t CudaExecutor::gemm_stream(cudaStream_t caller) {
  if (options_.partition.compute == nullptr || options_.partition.compute->has_stream(caller)) return caller;
  if (compute_stream_ == nullptr) {
    compute_stream_ =
        std::make_unique<CudaStream>(options_.device, CudaStream::Priority::kLow, options_.partition.compute);
  }
  return compute_stream_->get();
}

CudaExecutor::Pieces CudaExecutor::pieces_of(const Call& call) {
  const OverlapPlan& plan = call.plan();
  using Launch = PreparedCudaPlan::Launch;
  const bool plain = call.mode == Mode::kPlainGemm;
  // Nothing is sent of the plain product, so it is no better for being cut.
  const Cut cut = call.is_decomposed                  ? Cut::kGroupsAndArrivals
                  : call.operands.make_rows && !plain ? Cut::kGroups
                                                      : Cut::kNowhere;
  const PreparedGemms& gemms = call.prepared.gemm(
      call.operands, {.output = plain ? call.prepared.plain_output() : call.output,
                      .ldo = plain ? plan.grid.cols() : call.ldo,
                      .launch = plain                ? Launch::kPlain
                                : call.is_decomposed ? Launch::kDecomposed
                                : call.is_gated      ? Launch::kGated
                                                     : Launch::kRun,
                      .cut = cut,
                      // Behind all transfers it need leave no SM to them.
                      .num_sms = call.prepared.waits_for_all() ? serial_sms_ : call.prepared.gemm_sms(),
                      .is_captured = call.is_captured,
                      .gates = {.arrivals = call.is_decomposed ? all_open_.data() : arrivals_.data(),
                                .abort = &host_->abort,
                                .error = &host_->error,
                                // Longer than the communicator takes to fail: its error says more.
                                .timeout_ns = timeout_ns() + 5'000'000'000}});
  return {
      .ranges = call.prepared.launches(cut), .gemms = gemms, .cut = cut, .stream = gemm_stream(call.stream)};
}

void CudaExecutor::begin_gemm(const Call& call, cudaStream_t stream) {
  if (stream != call.stream) start_.wait_on(stream);
}

void CudaExecutor::end_gemm(const Call& call, cudaStream_t stream) {
  if (stream == call.stream) return;
  gemm_done_.record(stream);
  gemm_done_.wait_on(call.stream);
}

void CudaExecutor::enqueue_gemm(Call& call) {
  if (call.plan().schedule.empty()) return;
  if (call.plan().grid.k() == 0) return fill_for_empty_k(call);
  const Pieces pieces = pieces_of(call);
  begin_gemm(call, pieces.stream);
  for (std::size_t i = 0; i < pieces.ranges.size(); ++i) enqueue_piece(call, pieces, i);
  end_gemm(call, pieces.stream);
}

// What sends something off waits for nothing (gate_tables sees to that), so it comes before the transfers;
// what waits for a slice comes behind the transfer that brings it, whose event it waits for.
void CudaExecutor::enqueue_decomposed(Call& call) {
  if (call.plan().schedule.empty()) return enqueue_transfers(call);
  const Pieces pieces = pieces_of(call);
  begin_gemm(call, pieces.stream);
  std::size_t next = 0;
  while (next < pieces.ranges.size() && pieces.ranges[next].arrivals == 0)
    enqueue_piece(call, pieces, next++);
  enqueue_transfers(call);
  while (next < pieces.ranges.size()) enqueue_piece(call, pieces, next++);
  end_gemm(call, pieces.stream);
}

void CudaExecutor::enqueue_piece(Call& call, const Pieces& pieces, std::size_t piece) {
  const LaunchRange& range = pieces.ranges[piece];
  if (call.operands.make_rows) {
    make_rows(call, call.prepared.rows_of(pieces.cut)[piece]);
    if (pieces.stream != call.stream) {
      rows_made_.record(call.stream);
      rows_made_.wait_on(pieces.stream);
    }
  }
  if (range.arrivals > 0) arrived_[range.arrivals - 1].wait_on(pieces.stream);
  call.log.begin(pieces.stream, "GEMM", fmt::format("GEMM of {} tiles", range.count), SpanKind::kCompute);
  pieces.gemms[piece]->launch(pieces.stream);
  call.log.end(pieces.stream);
  if (call.is_decomposed && range.group >= 0)
    group_done_[static_cast<std::size_t>(range.group)].record(pieces.stream);
}

void CudaExecutor::make_rows(Call& call, std::span<const plan::RowRun> rows) {
  for (const plan::RowRun& run : rows) {
    call.log.begin(call.stream, "GEMM", fmt::format("rows {} to {} of A", run.first, run.first + run.count),
                   SpanKind::kCompute);
    call.operands.make_rows(run.first, run.count);
    call.log.end(call.stream);
  }
}

// Where the GEMM is not this library's, or there is none.
void CudaExecutor::make_all_rows(Call& call) {
  const std::int64_t rows = call.plan().grid.rows();
  if (!call.operands.make_rows || rows == 0) return;
  const plan::RowRun all{.first = 0, .count = rows};
  make_rows(call, {&all, 1});
}

// The product over no columns: zeros, wherever tiles would have gone; nobody counts, so nobody may wait.
void CudaExecutor::fill_for_empty_k(Call& call) {
  const OverlapPlan& plan = call.plan();
  make_all_rows(call);
  const auto size = static_cast<std::size_t>(size_of(plan.dtype));
  if (plan.packed_size > 0) {
    FLASHOVERLAP_CUDA_CHECK(cudaMemsetAsync(call.prepared.packed(), 0,
                                            static_cast<std::size_t>(plan.packed_size) * size, call.stream));
  }
  if (call.prepared.writes_in_place() && call.mode != Mode::kPlainGemm) {
    FLASHOVERLAP_CUDA_CHECK(cudaMemset2DAsync(call.output, static_cast<std::size_t>(call.ldo) * size, 0,
                                              static_cast<std::size_t>(plan.output_cols) * size,
                                              static_cast<std::size_t>(plan.output_rows), call.stream));
  }
  start_.record(call.stream);  // transfers come after the zeros
}

}  // namespace flashoverlap::cuda

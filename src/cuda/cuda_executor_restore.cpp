// What comes behind a GEMM and its transfers: rows go to their places, and through the epilogue.
#include "cuda_call.h"
#include "peer_kernels.h"

namespace flashoverlap::cuda {

void CudaExecutor::enqueue_restore(Call& call) {
  const OverlapPlan& plan = call.plan();
  const bool is_applied =
      is_plain(call.operands.epilogue) || call.prepared.fuses_epilogue(call.operands.epilogue);
  const bool is_in_place = call.output == call.operands.out && is_applied;
  if (plan.restore.bands.empty() && is_in_place) return;
  call.log.begin(call.stream, "restore", "restore and epilogue", SpanKind::kEpilogue);
  for (const PreparedCudaPlan::RestoreRun& run : call.prepared.restore_runs()) {
    if (!run.has_bands && is_in_place) continue;
    launch_restore(restore_params(call, run), call.stream);
  }
  call.log.end(call.stream);
}

RestoreParams CudaExecutor::restore_params(const Call& call, const PreparedCudaPlan::RestoreRun& run) const {
  const OverlapPlan& plan = call.plan();
  RestoreParams params{.dtype = plan.dtype,
                       .row_begin = run.rows.first,
                       .rows = run.rows.count,
                       .n = plan.output_cols,
                       .source = call.output,
                       .source_ld = call.ldo,
                       .sums = {},
                       .restore = {},
                       .out = call.operands.out,
                       .ldo = call.operands.ldo,
                       .epilogue = call.operands.epilogue};
  if (run.has_bands) {
    params.source = plan.restore.source == BufferKind::kPacked ? call.prepared.packed()
                    : call.puts                                ? window_->received()
                                                               : call.prepared.received();
    params.restore = call.prepared.tables(call.operands).restore();
    if (call.prepared.sums_in_restore()) {
      static_assert(PartialSums::kMost >= kMaxPeerRanks, "ranks that read each other's memory");
      params.sums.count = plan.world_size;
      for (std::int32_t r = 0; r < plan.world_size; ++r) params.sums.sources[r] = call.prepared.packed_of(r);
    }
  }
  return params;
}

// Where the product is the output, its epilogue is part of what is computed, however it is sent; where it is
// a partial sum it has none.
void CudaExecutor::enqueue_plain_epilogue(Call& call) {
  if (is_plain(call.operands.epilogue) || !call.prepared.product_is_output()) return;
  const OverlapPlan& plan = call.plan();
  void* const product = call.prepared.plain_output();
  call.log.begin(call.stream, "restore", "epilogue", SpanKind::kEpilogue);
  launch_restore({.dtype = plan.dtype,
                  .rows = plan.output_rows,
                  .n = plan.output_cols,
                  .source = product,
                  .source_ld = plan.output_cols,
                  .sums = {},
                  .restore = {},
                  .out = product,
                  .ldo = plan.output_cols,
                  .epilogue = call.operands.epilogue},
                 call.stream);
  call.log.end(call.stream);
}

}  // namespace flashoverlap::cuda

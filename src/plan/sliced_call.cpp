#include "plan/sliced_call.h"

#include <algorithm>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/slices.h"

namespace flashoverlap::plan {
namespace {

std::int64_t num_slices_of(const SlicedCall& call, SlicedPlan which) {
  return which == SlicedPlan::kSerial ? 1 : call.num_slices;
}

OverlapPlan plan_gather(const SlicedCall& call, const PlanOptions& options, SlicedPlan which) {
  const SliceAxis axis = call.op == SlicedOp::kAllGatherGemm ? SliceAxis::kRows : SliceAxis::kColumns;
  if (which == SlicedPlan::kTailFree) return plan_all_gather_gemm(options, call.slices.rows, axis);
  return plan_sliced_all_gather_gemm(options, call.slices.rows, num_slices_of(call, which), axis);
}

OverlapPlan plan_reduce(const SlicedCall& call, const PlanOptions& options, SlicedPlan which) {
  if (which == SlicedPlan::kTailFree) return plan_tail_free_reduce_scatter(options, call.slices.rows);
  return plan_reduce_scatter_in_slices(options, call.slices.rows, num_slices_of(call, which));
}

OverlapPlan plan_heads(const SlicedCall& call, const PlanOptions& options, SlicedPlan which) {
  if (which == SlicedPlan::kTailFree) return plan_gemm_all_to_all(options, call.slices);
  return plan_sliced_gemm_all_to_all(options, call.slices, num_slices_of(call, which));
}

OverlapPlan plan_from_heads(const SlicedCall& call, const PlanOptions& options, SlicedPlan which) {
  if (which == SlicedPlan::kTailFree) return plan_all_to_all_gemm(options, call.slices);
  return plan_sliced_all_to_all_gemm(options, call.slices, num_slices_of(call, which));
}

}  // namespace

bool along_heads(SlicedOp op) {
  return op == SlicedOp::kHeads || op == SlicedOp::kFromHeads;
}

OverlapPlan plan_sliced_call(const SlicedCall& call, const PlanOptions& options, SlicedPlan which) {
  switch (call.op) {
    case SlicedOp::kAllGatherGemm:
    case SlicedOp::kShardedWeight:
      return plan_gather(call, options, which);
    case SlicedOp::kReduceScatter:
    case SlicedOp::kGradient:
      return plan_reduce(call, options, which);
    case SlicedOp::kHeads:
      return plan_heads(call, options, which);
    case SlicedOp::kFromHeads:
      return plan_from_heads(call, options, which);
  }
  core::fail(ErrorKind::kInternal, "operator {} is not known here", static_cast<int>(call.op));
}

OverlapPlan plan_reduce_scatter_in_slices(PlanOptions options, const SliceOptions& slices,
                                          std::int64_t num_slices) {
  check_num_slices(num_slices);
  const std::int64_t waves = num_waves_reduce_scatter(options, slices);
  const std::int64_t groups = std::min(num_slices, waves);
  options.partition.clear();
  for (std::int64_t i = 0; i < groups; ++i) {
    options.partition.push_back(share_begin(waves, groups, i + 1) - share_begin(waves, groups, i));
  }
  return plan_reduce_scatter(options, slices);
}

}  // namespace flashoverlap::plan

// The operators, for tests that do the same with several of them.
#pragma once

#include <memory>

#include "flashoverlap/operators.h"

namespace flashoverlap::gpu_test {

enum class OperatorKind {
  kAllReduce,
  kSignal,
  kTailFree,
  kAllGather,
  kShardedWeight,
  kHeads,
  kFromHeads,
};

/// `slices`: of what travels in slices, but from heads. `baseline`: of a tail-free reduce-scatter.
inline std::unique_ptr<GemmOperator> make_any(Context& context, OperatorKind kind, const GemmOptions& options,
                                              const SliceOptions& slices = {},
                                              const BaselineOptions& baseline = {}) {
  HeadSlices heads;
  heads.columns = slices;
  switch (kind) {
    case OperatorKind::kAllReduce:
      return std::make_unique<GemmAllReduce>(context, options);
    case OperatorKind::kSignal:
      return std::make_unique<GemmReduceScatter>(context, options);
    case OperatorKind::kTailFree:
      return std::make_unique<GemmReduceScatter>(context, options, OverlapMethod::kTailFree, slices,
                                                 baseline);
    case OperatorKind::kAllGather:
      return std::make_unique<AllGatherGemm>(context, options, slices);
    case OperatorKind::kShardedWeight:
      return std::make_unique<ShardedWeightGemm>(context, options, slices);
    case OperatorKind::kHeads:
      return std::make_unique<GemmAllToAll>(context, options, heads);
    case OperatorKind::kFromHeads:
      return std::make_unique<AllToAllGemm>(context, options, HeadSlices{});
  }
  return nullptr;
}

}  // namespace flashoverlap::gpu_test

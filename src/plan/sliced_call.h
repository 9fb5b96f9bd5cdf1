#pragma once

#include <cstdint>
#include <string_view>

#include "flashoverlap/plan_builders.h"

/// The plans of the operators whose data travels in slices (arXiv 2604.24013), for those who ask without
/// having ranks: the command and the Python package.
namespace flashoverlap::plan {

enum class SlicedOp {
  kAllGatherGemm,
  kReduceScatter,  ///< GemmReduceScatter, tail-free.
  kShardedWeight,
  kGradient,
  kHeads,      ///< GemmAllToAll along heads.
  kFromHeads,  ///< AllToAllGemm.
};

enum class SlicedPlan {
  kTailFree,
  kSerial,  ///< One collective.
  kSliced,  ///< The slicing baseline.
};

struct SlicedCall {
  SlicedOp op = SlicedOp::kAllGatherGemm;
  HeadSlices slices;            ///< `columns` is used along heads only.
  std::int64_t num_slices = 1;  ///< Of the slicing baseline, >= 1.
};

/// Attention's operators, whose slices are heads.
[[nodiscard]] bool along_heads(SlicedOp op);

/// `options.m`, `n` and `k` mean what they mean in GemmOptions of this operator. Throws Error(kBadArgument)
/// for options that do not hold.
[[nodiscard]] OverlapPlan plan_sliced_call(const SlicedCall& call, const PlanOptions& options,
                                           SlicedPlan which);

/// plan_reduce_scatter in `num_slices` groups of nearly equally many waves, fewer where there are not so many
/// waves: the slicing baseline; 1: serial. `options.partition` is not used.
[[nodiscard]] OverlapPlan plan_reduce_scatter_in_slices(PlanOptions options, const SliceOptions& slices,
                                                        std::int64_t num_slices);

}  // namespace flashoverlap::plan

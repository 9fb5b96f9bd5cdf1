#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flashoverlap/moe_plan.h"
#include "ops/moe_passes.h"
#include "ops/moe_rows.h"
#include "ops/work_list.h"

/// What a backward pass of the MoE layer computes beside its two GEMMs, as steps that fill the waits of
/// these. Everything that is passed by pointer or reference must outlive the list.
namespace flashoverlap::ops {

/// The rows of one rank's experts, cut into steps for a product over rows.
struct ExpertRows {
  struct Step {
    std::int64_t row_begin = 0;  ///< In the expert rows.
    std::int64_t rows = 0;
    std::size_t first_slice = 0;  ///< The slices that bring these rows: [first, first + num) of `slices`.
    std::size_t num_slices = 0;
  };
  /// By local expert, in the order in which the rows are expected: this rank's own first, then owners
  /// rank - 1, rank - 2, … The order is the layout's alone, so sums have the same bits in every call.
  std::vector<std::vector<Step>> experts;
  std::vector<std::int64_t> slices;
};

/// `dispatch`: the plan that brings the rows, [.., k].
ExpertRows expert_rows(const MoeLayout& layout, const OverlapPlan& dispatch, std::int64_t first_expert,
                       std::int64_t num_experts);

/// to[i] = from[i]^T for a stack of `count` matrices [rows, cols].
void add_transposes(WorkList& work, std::int64_t count, std::int64_t rows, std::int64_t cols, DType dtype,
                    const std::byte* from, std::byte* to);

/// gradient[t, slot] = out_gradient[t] · results[row of (t, slot)], in float64; 0 without a row.
void add_weight_gradient(WorkList& work, const MoeRouting& routing, const SendRows& rows,
                         const std::byte* results, const RowsView& out_gradient, std::int64_t cols,
                         DType dtype, float* gradient);

/// A dense matrix with the expert rows' rows.
struct RowsMatrix {
  const std::byte* data = nullptr;
  std::int64_t cols = 0;
};

/// to[e] = sum over the rows r of expert e of left[r]^T · right[r]: [left.cols, right.cols] in float32, for
/// each local expert. Bitwise repeatable for one layout. `wait`: a step waits for its rows to arrive.
void add_expert_products(WorkList& work, const ExpertRows& rows, bool wait, DType dtype,
                         const RowsMatrix& left, const RowsMatrix& right, float* to);

}  // namespace flashoverlap::ops

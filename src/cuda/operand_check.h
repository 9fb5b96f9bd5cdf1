// What the GPU executor asks of the matrices of a call, checked before anything is launched.
#pragma once

#include "flashoverlap/executor.h"
#include "flashoverlap/plan.h"

namespace flashoverlap::cuda {

/// Throws Error(kBadArgument) naming the matrix, its value and what it must be: null or misaligned pointers,
/// host pointers, pointers on another device, leading dimensions shorter than a row, an output that overlaps
/// an input.
void check_operands(const OverlapPlan& plan, const Operands& operands, int device);

/// Whether a transfer of the plan reads or writes `buffer`.
[[nodiscard]] bool is_moved(const OverlapPlan& plan, BufferKind buffer);

}  // namespace flashoverlap::cuda

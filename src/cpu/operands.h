#pragma once

#include "cpu/prepared_plan.h"
#include "flashoverlap/executor.h"

namespace flashoverlap::cpu {

/// Throws Error(kBadArgument) when a matrix of the call is missing, misaligned, has a leading dimension
/// shorter than its rows, or when what is written overlaps what is read. Reads and writes no matrix.
void check_operands(const CpuPreparedPlan& prepared, const Operands& operands);

}  // namespace flashoverlap::cpu

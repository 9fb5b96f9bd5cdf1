// Whether the memory that a plan's transfers move may be registered with NCCL. Knows no CUDA, so that it is
// tested everywhere.
#pragma once

#include <cstdint>

#include "flashoverlap/plan.h"

namespace flashoverlap::cuda {

/// 0: it may not, since something travels to or from the caller's matrices, which are not registered, and
/// NCCL wants both ends of a message registered, or neither. Otherwise what must be equal on all ranks: a
/// number for where all-reduces, reduce-scatters and all-gathers find what other ranks read or write of this
/// one's, which NCCL takes to be at the same offset of every rank's window.
[[nodiscard]] std::uint64_t registered_layout(const OverlapPlan& plan);

}  // namespace flashoverlap::cuda

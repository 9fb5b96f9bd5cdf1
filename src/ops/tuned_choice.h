#pragma once

#include "flashoverlap/call_tuner.h"
#include "ops/operator_state.h"

namespace flashoverlap::ops {

/// The call as tuners are asked about it.
[[nodiscard]] OpenCall open_call(const Context& context, const PlanOptions& options,
                                 const PlanRecipe& recipe);

/// Fills in what `options` leaves open as the context's tuner says. Rank 0 decides and tells the others, so
/// that all ranks come to the same whatever each knows of its machine. Collective: either all ranks have a
/// tuner or none. Nothing happens when the partition is given, or without a tuner.
void take_tuned(Context& context, PlanOptions& options, const PlanRecipe& recipe);

}  // namespace flashoverlap::ops

#pragma once

#include "comm/call.h"

namespace flashoverlap::comm {

/// Checks what one rank can check on its own, before anything else happens: counts, buffers (null,
/// misaligned, overlapping where that is not allowed), peer. Throws Error(kBadArgument). `rank` and `size`
/// are those of the call's group.
void check_call(const Call& call, int rank, int size);

}  // namespace flashoverlap::comm

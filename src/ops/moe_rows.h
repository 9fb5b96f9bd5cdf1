#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/moe_plan.h"

namespace flashoverlap::ops {

/// The send rows of one rank: which token and slot each is, and the other way round.
struct SendRows {
  std::vector<std::int64_t> token;  ///< By send row.
  std::vector<std::int32_t> slot;
  std::vector<std::int64_t> row;  ///< [tokens, top_k]: the send row, or -1: no expert, or dropped.
  std::int64_t dropped = 0;
};

/// In the order of experts, then tokens, then slots; of each expert the first `kept[expert]` rows.
SendRows make_send_rows(const MoeRouting& routing, const std::vector<std::int64_t>& kept);

}  // namespace flashoverlap::ops

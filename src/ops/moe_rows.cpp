#include "ops/moe_rows.h"

namespace flashoverlap::ops {

SendRows make_send_rows(const MoeRouting& routing, const std::vector<std::int64_t>& kept) {
  std::vector<std::int64_t> next(kept.size());
  std::vector<std::int64_t> end(kept.size());
  std::int64_t total = 0;
  for (std::size_t expert = 0; expert < kept.size(); ++expert) {
    next[expert] = total;
    total += kept[expert];
    end[expert] = total;
  }
  SendRows rows;
  rows.token.resize(static_cast<std::size_t>(total));
  rows.slot.resize(static_cast<std::size_t>(total));
  rows.row.assign(routing.experts.size(), -1);
  std::size_t i = 0;
  for (std::int64_t token = 0; token < routing.tokens; ++token) {
    for (std::int32_t slot = 0; slot < routing.top_k; ++slot, ++i) {
      if (routing.experts[i] < 0) continue;
      const auto expert = static_cast<std::size_t>(routing.experts[i]);
      if (next[expert] == end[expert]) {
        ++rows.dropped;
        continue;
      }
      const std::int64_t row = next[expert]++;
      rows.token[static_cast<std::size_t>(row)] = token;
      rows.slot[static_cast<std::size_t>(row)] = slot;
      rows.row[i] = row;
    }
  }
  return rows;
}

}  // namespace flashoverlap::ops

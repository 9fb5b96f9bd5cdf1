#include <algorithm>
#include <map>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify.h"

/// What transfers write does not collide, and what they read is there when they read it.
namespace flashoverlap::plan {
namespace {

using core::no;

bool is_reduction(const Transfer& t) {
  return t.kind == TransferKind::kAllReduce || t.kind == TransferKind::kReduceScatter;
}

Incoming written_by(const OverlapPlan& plan, std::int64_t i) {
  const Transfer& t = plan.transfers[index(i)];
  const Region& touched = is_reduction(t) ? t.source : t.destination;
  return {.buffer = touched.buffer,
          .begin = t.destination.offset,
          .end = t.destination.offset + t.destination.count,
          .touched_begin = touched.offset,
          .touched_end = touched.offset + touched.count,
          .transfer = i,
          .slice = t.slice};
}

Verdict check_target(const OverlapPlan& plan, const Incoming& in) {
  if (in.buffer == BufferKind::kPacked &&
      (in.transfer < 0 || !is_reduction(plan.transfers[index(in.transfer)]))) {
    return no("{} writes into the packed buffer, over tiles", describe(plan, in));
  }
  if ((in.buffer == BufferKind::kInput || in.buffer == BufferKind::kWeight) && in.slice < 0) {
    return no("{} writes into the {} buffer, but brings no slice that tiles could wait for",
              describe(plan, in), name_of(in.buffer));
  }
  return {};
}

bool before(const Incoming& a, const Incoming& b) {
  return a.buffer != b.buffer ? a.buffer < b.buffer : a.touched_begin < b.touched_begin;
}

/// What one channel has seen when it comes to a transfer.
struct Seen {
  std::vector<bool> groups;
  std::vector<bool> slices;
  std::vector<bool> transfers;
};

Verdict check_packed_source(const OverlapPlan& plan, const Facts& facts,
                            const std::vector<std::int64_t>& groups_by_offset, const Seen& seen,
                            std::int64_t i) {
  const Region& source = plan.transfers[index(i)].source;
  auto it = std::ranges::partition_point(
      groups_by_offset, [&](std::int64_t g) { return facts.packed_end[index(g)] <= source.offset; });
  for (; it != groups_by_offset.end() && facts.packed_begin[index(*it)] < source.offset + source.count;
       ++it) {
    if (!seen.groups[index(*it)]) {
      return no("{} reads {}, but nothing makes it wait for group {}, which is at elements [{}, {})",
                describe(plan, i), describe(source), *it, facts.packed_begin[index(*it)],
                facts.packed_end[index(*it)]);
    }
  }
  return {};
}

/// Rows of a dense matrix with `cols` columns; does [begin, end) touch the tile?
bool touches(Tile tile, const OverlapPlan& plan, std::int64_t begin, std::int64_t end) {
  const std::int64_t cols = plan.output_cols;
  tile.row_begin += plan.output_row_shift;
  tile.col_begin += plan.output_col_shift;
  const std::int64_t first = std::max(tile.row_begin, begin / cols);
  const std::int64_t last = std::min(tile.row_begin + tile.rows - 1, (end - 1) / cols);
  if (first > last) return false;
  if (last - first > 1) return true;  // A row between the first and the last is covered as a whole.
  for (const std::int64_t row : {first, last}) {
    if (std::max(begin, row * cols + tile.col_begin) < std::min(end, row * cols + tile.col_begin + tile.cols))
      return true;
  }
  return false;
}

/// In-place tiles that a transfer reads are complete.
Verdict check_output_source(const OverlapPlan& plan, const Facts& facts, const Seen& seen, std::int64_t i) {
  const Region& source = plan.transfers[index(i)].source;
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    const Tile& tile = plan.grid.tile(t);
    const std::int64_t group = facts.group_of_tile[index(t)];
    if (seen.groups[index(group)] || !plan.placement.of_tile(t).empty()) continue;
    if (touches(tile, plan, source.offset, source.offset + source.count)) {
      return no("{} reads tile {} in the output, but nothing makes it wait for group {}", describe(plan, i),
                t, group);
    }
  }
  return {};
}

/// What has to arrive before it is read has arrived; everything read in the received buffer has to.
Verdict check_arrived(const OverlapPlan& plan, const Facts& facts, const Seen& seen, std::int64_t i) {
  const Region& source = plan.transfers[index(i)].source;
  const std::int64_t end = source.offset + source.count;
  std::int64_t next = source.offset;
  auto it = std::ranges::partition_point(facts.incoming, [&](const Incoming& in) {
    return in.buffer != source.buffer ? in.buffer < source.buffer : in.touched_end <= source.offset;
  });
  for (; it != facts.incoming.end() && it->buffer == source.buffer && it->touched_begin < end; ++it) {
    if (it->transfer == i) return {};  // In place.
    const bool arrived = (it->transfer >= 0 && seen.transfers[index(it->transfer)]) ||
                         (it->slice >= 0 && seen.slices[index(it->slice)]);
    if (!arrived) {
      return no("{} reads {}, but nothing makes it wait for {}", describe(plan, i), describe(source),
                describe(plan, *it));
    }
    if (it->begin > next) break;
    next = it->end;
  }
  if (source.buffer == BufferKind::kReceived && next < end) {
    return no("{} reads elements [{}, {}) of the received buffer, where nothing arrives", describe(plan, i),
              next, end);
  }
  return {};
}

}  // namespace

Verdict check_incoming(const OverlapPlan& plan, Facts& facts) {
  std::vector<bool> brought(plan.slices.size(), false);
  for (std::int64_t i = 0; i < std::ssize(plan.transfers); ++i) {
    const Transfer& t = plan.transfers[index(i)];
    if (t.kind == TransferKind::kSend || t.kind == TransferKind::kPut) continue;
    if (t.slice >= 0) brought[index(t.slice)] = true;
    facts.incoming.push_back(written_by(plan, i));
  }
  for (std::int64_t s = 0; s < std::ssize(plan.slices); ++s) {
    if (brought[index(s)]) continue;
    const Region& region = plan.slices[index(s)].region;
    const std::int64_t end = region.offset + region.count;
    facts.incoming.push_back({region.buffer, region.offset, end, region.offset, end, -1, s});
  }
  for (const Incoming& in : facts.incoming) {
    if (Verdict v = check_target(plan, in); !v) return v;
  }
  // What writes nothing can neither collide nor be read.
  std::erase_if(facts.incoming, [](const Incoming& in) { return in.touched_begin == in.touched_end; });
  std::ranges::stable_sort(facts.incoming, before);
  for (std::size_t i = 1; i < facts.incoming.size(); ++i) {
    const Incoming& a = facts.incoming[i - 1];
    const Incoming& b = facts.incoming[i];
    if (a.buffer == b.buffer && b.touched_begin < a.touched_end) {
      return no("{} and {} both write element {} of the {} buffer", describe(plan, a), describe(plan, b),
                b.touched_begin, name_of(a.buffer));
    }
  }
  return {};
}

Verdict check_order(const OverlapPlan& plan, const Facts& facts) {
  std::vector<std::int64_t> groups_by_offset;
  for (std::int64_t g = 0; g < std::ssize(plan.groups); ++g) {
    if (facts.packed_begin[index(g)] < facts.packed_end[index(g)]) groups_by_offset.push_back(g);
  }
  std::ranges::sort(groups_by_offset, {}, [&](std::int64_t g) { return facts.packed_begin[index(g)]; });

  std::map<std::int32_t, Seen> channels;
  for (std::int64_t i = 0; i < std::ssize(plan.transfers); ++i) {
    const Transfer& t = plan.transfers[index(i)];
    auto [channel, fresh] = channels.try_emplace(t.channel);
    Seen& seen = channel->second;
    if (fresh) {
      seen = {std::vector<bool>(plan.groups.size()), std::vector<bool>(plan.slices.size()),
              std::vector<bool>(plan.transfers.size())};
    }
    if (t.trigger.kind == TriggerKind::kGroup) seen.groups[index(t.trigger.index)] = true;
    if (t.trigger.kind == TriggerKind::kSlice) seen.slices[index(t.trigger.index)] = true;
    if (t.source.count > 0) {
      if (t.source.buffer == BufferKind::kPacked) {
        if (Verdict v = check_packed_source(plan, facts, groups_by_offset, seen, i); !v) return v;
      }
      if (t.source.buffer == BufferKind::kOutput) {
        if (Verdict v = check_output_source(plan, facts, seen, i); !v) return v;
      }
      if (Verdict v = check_arrived(plan, facts, seen, i); !v) return v;
    }
    seen.transfers[index(i)] = true;
  }
  return {};
}

}  // namespace flashoverlap::plan

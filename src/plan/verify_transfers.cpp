#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify.h"

/// Each slice and each transfer on its own: indices, regions, counts.
namespace flashoverlap::plan {
namespace {

using core::no;

/// Sum of one non-negative count per rank, or the reason against it.
Verdict sum_counts(const OverlapPlan& plan, const std::vector<std::int64_t>& counts, const std::string& what,
                   std::int64_t& total) {
  if (std::ssize(counts) != plan.world_size) {
    return no("{} has {} entries; expected one for each of {} ranks", what, counts.size(), plan.world_size);
  }
  total = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    const auto next = counts[r] < 0 ? std::nullopt : sum(total, counts[r]);
    if (!next) return no("{}[{}] is {}; expected a count of elements", what, r, counts[r]);
    total = *next;
  }
  return {};
}

/// This rank's chunk of `whole`, which is cut by `counts`, or equally when there are none.
Verdict own_chunk(const OverlapPlan& plan, const Region& whole, const std::vector<std::int64_t>& counts,
                  const std::string& what, Region& chunk) {
  if (counts.empty()) {
    if (whole.count % plan.world_size != 0) {
      return no("{}: {} elements without counts cannot be shared equally by {} ranks", what, whole.count,
                plan.world_size);
    }
    const std::int64_t each = whole.count / plan.world_size;
    chunk = {whole.buffer, whole.offset + plan.rank * each, each};
    return {};
  }
  std::int64_t total = 0;
  if (Verdict v = sum_counts(plan, counts, what + ": counts", total); !v) return v;
  if (total != whole.count)
    return no("{}: counts sum to {}, but the region has {} elements", what, total, whole.count);
  chunk = {whole.buffer, whole.offset, counts[index(plan.rank)]};
  for (std::int32_t r = 0; r < plan.rank; ++r) chunk.offset += counts[index(r)];
  return {};
}

Verdict no_counts(const Transfer& t, const std::string& what) {
  if (t.send_counts.empty() && t.receive_counts.empty()) return {};
  return no("{} has {} send_counts and {} receive_counts; expected none", what, t.send_counts.size(),
            t.receive_counts.size());
}

Verdict check_all_reduce(const Transfer& t, const std::string& what) {
  if (t.source != t.destination) {
    return no("{} must be in place, but reads {} and writes {}", what, describe(t.source),
              describe(t.destination));
  }
  return no_counts(t, what);
}

Verdict check_reduce_scatter(const OverlapPlan& plan, const Transfer& t, const std::string& what) {
  Region chunk;
  if (Verdict v = own_chunk(plan, t.source, t.send_counts, what, chunk); !v) return v;
  if (t.destination != chunk) {
    return no("{} must write its own chunk, {}, but writes {}", what, describe(chunk),
              describe(t.destination));
  }
  if (!t.receive_counts.empty()) return no("{} has receive_counts; expected none", what);
  return {};
}

Verdict check_all_gather(const OverlapPlan& plan, const Transfer& t, const std::string& what) {
  Region chunk;
  if (Verdict v = own_chunk(plan, t.destination, t.receive_counts, what, chunk); !v) return v;
  if (t.source != chunk) {
    return no("{} must read its own chunk, {}, but reads {}", what, describe(chunk), describe(t.source));
  }
  if (!t.send_counts.empty()) return no("{} has send_counts; expected none", what);
  return {};
}

Verdict check_all_to_all(const OverlapPlan& plan, const Transfer& t, const std::string& what) {
  std::int64_t sent = 0;
  std::int64_t received = 0;
  if (Verdict v = sum_counts(plan, t.send_counts, what + ": send_counts", sent); !v) return v;
  if (Verdict v = sum_counts(plan, t.receive_counts, what + ": receive_counts", received); !v) return v;
  if (sent != t.source.count) {
    return no("{}: send_counts sum to {}, but the source has {} elements", what, sent, t.source.count);
  }
  if (received != t.destination.count) {
    return no("{}: receive_counts sum to {}, but the destination has {} elements", what, received,
              t.destination.count);
  }
  if (t.source.buffer == t.destination.buffer && t.source.offset < t.destination.offset + received &&
      t.destination.offset < t.source.offset + sent) {
    return no("{} must not be in place, but reads {} and writes {}", what, describe(t.source),
              describe(t.destination));
  }
  return {};
}

Verdict check_point_to_point(const OverlapPlan& plan, const Transfer& t, const std::string& what) {
  if (t.peer < 0 || t.peer >= plan.world_size)
    return no("{}: peer {} is not in [0, {})", what, t.peer, plan.world_size);
  if (Verdict v = no_counts(t, what); !v) return v;
  if (t.kind == TransferKind::kPut) {
    if (t.slice < 0) return no("{} marks no slice, so the peer could not know that it has arrived", what);
    if (t.source.count != t.destination.count) {
      return no("{} reads {} elements and writes {}", what, t.source.count, t.destination.count);
    }
    return {};
  }
  if (t.peer == plan.rank) return no("{}: peer {} is this rank itself", what, t.peer);
  if (t.kind == TransferKind::kSend && t.destination.count != 0) {
    return no("{} must not write here, but writes {}", what, describe(t.destination));
  }
  if (t.kind == TransferKind::kSend && t.slice != -1)
    return no("{} must not mark slice {} as arrived", what, t.slice);
  if (t.kind == TransferKind::kReceive && t.source.count != 0) {
    return no("{} must not read here, but reads {}", what, describe(t.source));
  }
  return {};
}

Verdict check_kind(const OverlapPlan& plan, const Transfer& t, const std::string& what) {
  const bool collective =
      t.kind != TransferKind::kSend && t.kind != TransferKind::kReceive && t.kind != TransferKind::kPut;
  if (collective && t.peer != -1) return no("{} is collective, but has peer {}; expected -1", what, t.peer);
  switch (t.kind) {
    case TransferKind::kAllReduce:
      return check_all_reduce(t, what);
    case TransferKind::kReduceScatter:
      return check_reduce_scatter(plan, t, what);
    case TransferKind::kAllGather:
      return check_all_gather(plan, t, what);
    case TransferKind::kAllToAll:
      return check_all_to_all(plan, t, what);
    case TransferKind::kSend:
    case TransferKind::kReceive:
    case TransferKind::kPut:
      return check_point_to_point(plan, t, what);
  }
  return no("{} has kind {}, which does not exist", what, static_cast<int>(t.kind));
}

Verdict check_trigger(const OverlapPlan& plan, const Transfer& t, std::int64_t i) {
  std::int64_t limit = 1;  // The start is the only one of its kind.
  if (t.trigger.kind == TriggerKind::kGroup) limit = std::ssize(plan.groups);
  if (t.trigger.kind == TriggerKind::kSlice) limit = std::ssize(plan.slices);
  if (t.trigger.kind == TriggerKind::kStart ? t.trigger.index != 0
                                            : t.trigger.index < 0 || t.trigger.index >= limit) {
    constexpr std::array kNames = {"start", "group", "slice"};
    return no("transfer {} is set off by {} {}, which is not in [0, {})", i,
              kNames[static_cast<std::size_t>(t.trigger.kind)], t.trigger.index, limit);
  }
  if (t.channel < 0) return no("transfer {} has channel {}; expected at least 0", i, t.channel);
  return {};
}

/// The slice that a transfer brings here is where the transfer writes.
Verdict check_brought_slice(const OverlapPlan& plan, const Transfer& t, const std::string& what) {
  if (t.kind == TransferKind::kPut || t.slice == -1) return {};
  if (t.slice < 0 || t.slice >= std::ssize(plan.slices)) {
    return no("{} brings slice {}, which is not in [0, {})", what, t.slice, plan.slices.size());
  }
  const Slice& slice = plan.slices[index(t.slice)];
  if (t.kind == TransferKind::kReceive && slice.source != t.peer) {
    return no("{} brings slice {}, but that comes from rank {}", what, t.slice, slice.source);
  }
  const Region& inner = slice.region;
  const Region& outer = t.destination;
  const bool same = t.kind != TransferKind::kReceive || inner == outer;
  if (!same || inner.buffer != outer.buffer || inner.offset < outer.offset ||
      inner.offset + inner.count > outer.offset + outer.count) {
    return no("{} writes {}, but brings slice {}, which is {}", what, describe(outer), t.slice,
              describe(inner));
  }
  return {};
}

/// No peer gets, or sends, more messages than the plan says of all pairs of ranks.
Verdict check_message_counts(const OverlapPlan& plan) {
  if (plan.messages_per_pair < 0)
    return no("messages_per_pair is {}; expected at least 0", plan.messages_per_pair);
  if (plan.messages_per_pair == 0) return {};
  std::map<std::pair<TransferKind, std::int32_t>, std::int64_t> counts;
  for (const Transfer& t : plan.transfers) {
    if (t.kind != TransferKind::kSend && t.kind != TransferKind::kReceive) continue;
    const std::int64_t count = ++counts[{t.kind, t.peer}];
    if (count <= plan.messages_per_pair) continue;
    return no("more than messages_per_pair, {}, messages go {} rank {}", plan.messages_per_pair,
              t.kind == TransferKind::kSend ? "to" : "here from", t.peer);
  }
  return {};
}

}  // namespace

Verdict check_slices(const OverlapPlan& plan, const Facts& facts) {
  for (std::int64_t s = 0; s < std::ssize(plan.slices); ++s) {
    const Slice& slice = plan.slices[index(s)];
    if (slice.source < 0 || slice.source >= plan.world_size) {
      return no("slice {} comes from rank {}, which is not in [0, {})", s, slice.source, plan.world_size);
    }
    if (Verdict v = check_region(facts, slice.region, fmt::format("slice {}", s)); !v) return v;
  }
  return {};
}

Verdict check_transfers(const OverlapPlan& plan, const Facts& facts) {
  std::vector<std::int64_t> brought_by(plan.slices.size(), -1);
  for (std::int64_t i = 0; i < std::ssize(plan.transfers); ++i) {
    const Transfer& t = plan.transfers[index(i)];
    if (Verdict v = check_trigger(plan, t, i); !v) return v;
    const std::string what = describe(plan, i);
    if (Verdict v = check_region(facts, t.source, what + ": source"); !v) return v;
    // A put writes into the peer's memory: only the peer's plan can tell whether it fits.
    if (t.kind != TransferKind::kPut) {
      if (Verdict v = check_region(facts, t.destination, what + ": destination"); !v) return v;
    }
    if (Verdict v = check_kind(plan, t, what); !v) return v;
    if (Verdict v = check_brought_slice(plan, t, what); !v) return v;
    if (t.kind == TransferKind::kPut || t.slice < 0) continue;
    std::int64_t& first = brought_by[index(t.slice)];
    if (first >= 0) return no("slice {} is brought twice, by transfers {} and {}", t.slice, first, i);
    first = i;
  }
  return check_message_counts(plan);
}

}  // namespace flashoverlap::plan

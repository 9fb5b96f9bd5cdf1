#include "plan/verify_ranks.h"

#include <algorithm>

#include "core/fail.h"
#include "plan/arithmetic.h"

namespace flashoverlap {
namespace plan {
namespace {

using core::no;

Verdict check_agreement(Plans plans) {
  const OverlapPlan& first = plans.front();
  for (std::size_t r = 0; r < plans.size(); ++r) {
    const OverlapPlan& plan = plans[r];
    if (std::cmp_not_equal(plan.world_size, plans.size())) {
      return no("rank {}: world_size is {}, but there are plans of {} ranks", r, plan.world_size,
                plans.size());
    }
    if (std::cmp_not_equal(plan.rank, r)) return no("plan {} is that of rank {}", r, plan.rank);
    if (plan.operation != first.operation) {
      return no("rank 0 plans {}, but rank {} plans {}", first.operation, r, plan.operation);
    }
    if (plan.dtype != first.dtype) {
      return no("rank 0 plans for {}, but rank {} for {}", name_of(first.dtype), r, name_of(plan.dtype));
    }
    if (plan.agreement != first.agreement) {
      return no(
          "rank 0 has agreement {:016x}, but rank {} has {:016x}: their shapes, types, tiles, partitions or "
          "routings "
          "differ",
          first.agreement, r, plan.agreement);
    }
    if (plan.messages_per_pair != first.messages_per_pair) {
      return no("rank 0 has messages_per_pair {}, but rank {} has {}", first.messages_per_pair, r,
                plan.messages_per_pair);
    }
  }
  return {};
}

/// Whether rank r's put `i` is what the peer's plan expects.
Verdict check_put(Plans plans, std::span<const Facts> facts, std::size_t r, std::int64_t i) {
  const Transfer& put = plans[r].transfers[index(i)];
  const OverlapPlan& peer = plans[index(put.peer)];
  const std::string what = "rank " + std::to_string(r) + ": " + describe(plans[r], i);
  if (Verdict v = check_region(facts[index(put.peer)], put.destination, what + ": destination"); !v) return v;
  if (put.slice >= std::ssize(peer.slices)) {
    return no("{} marks slice {} as arrived, which is not in [0, {})", what, put.slice, peer.slices.size());
  }
  const Slice& slice = peer.slices[index(put.slice)];
  if (std::cmp_not_equal(slice.source, r) || slice.region != put.destination) {
    return no("{} writes {} for slice {}, but there that is {} from rank {}", what, describe(put.destination),
              put.slice, describe(slice.region), slice.source);
  }
  return {};
}

}  // namespace

Verdict check_arrivals(Plans plans, std::span<const Facts> facts) {
  std::vector<std::vector<TransferId>> brought_by(plans.size());
  for (std::size_t r = 0; r < plans.size(); ++r) brought_by[r].resize(plans[r].slices.size());
  for (std::size_t r = 0; r < plans.size(); ++r) {
    for (std::int64_t i = 0; i < std::ssize(plans[r].transfers); ++i) {
      const Transfer& t = plans[r].transfers[index(i)];
      if (t.slice < 0) continue;
      const bool put = t.kind == TransferKind::kPut;
      if (put) {
        if (Verdict v = check_put(plans, facts, r, i); !v) return v;
      }
      const std::size_t at = put ? index(t.peer) : r;
      TransferId& first = brought_by[at][index(t.slice)];
      if (first.rank >= 0) {
        return no("slice {} of rank {} arrives twice: by {} of rank {} and by {} of rank {}", t.slice, at,
                  describe(plans[index(first.rank)], first.transfer), first.rank, describe(plans[r], i), r);
      }
      first = {static_cast<std::int32_t>(r), i};
    }
  }
  for (std::size_t r = 0; r < plans.size(); ++r) {
    for (std::size_t s = 0; s < brought_by[r].size(); ++s) {
      if (brought_by[r][s].rank < 0) {
        return no(
            "slice {} of rank {} never arrives: no transfer here brings it, and rank {} does not put it", s,
            r, plans[r].slices[s].source);
      }
    }
  }
  return {};
}

bool is_collective(TransferKind kind) {
  return kind != TransferKind::kSend && kind != TransferKind::kReceive && kind != TransferKind::kPut;
}

}  // namespace plan

Verdict verify(std::span<const OverlapPlan> plans) {
  if (plans.empty()) return core::no("there is no plan: a world has at least 1 rank");
  if (Verdict v = plan::check_agreement(plans); !v) return v;
  std::vector<plan::Facts> facts(plans.size());
  for (std::size_t r = 0; r < plans.size(); ++r) {
    if (Verdict v = plan::verify_one(plans[r], facts[r]); !v) return core::no("rank {}: {}", r, v.reason);
  }
  plan::Matching matching;
  if (Verdict v = plan::match_transfers(plans, matching); !v) return v;
  if (Verdict v = plan::check_summands(plans, facts, matching); !v) return v;
  if (Verdict v = plan::check_arrivals(plans, facts); !v) return v;
  if (Verdict v = plan::run_symbolically(plans, matching); !v) return v;
  if (Verdict v = plan::check_input_origins(plans, matching); !v) return v;
  return plan::check_origins(plans, facts, matching);
}

}  // namespace flashoverlap

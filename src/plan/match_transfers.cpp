#include <algorithm>
#include <array>
#include <tuple>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify_ranks.h"

namespace flashoverlap::plan {
namespace {

using core::no;

void collect(Plans plans, Matching& m) {
  for (const OverlapPlan& plan : plans) {
    for (const Transfer& t : plan.transfers) m.channels.push_back(t.channel);
  }
  std::ranges::sort(m.channels);
  m.channels.erase(std::unique(m.channels.begin(), m.channels.end()), m.channels.end());

  for (const OverlapPlan& plan : plans) {
    auto& of_channel = m.transfers.emplace_back(m.channels.size());
    auto& ordinal = m.ordinal.emplace_back();
    m.partner.emplace_back(plan.transfers.size());
    std::vector<std::int64_t> collectives(m.channels.size(), 0);
    for (std::int64_t i = 0; i < std::ssize(plan.transfers); ++i) {
      const Transfer& t = plan.transfers[index(i)];
      const auto channel =
          static_cast<std::size_t>(std::ranges::lower_bound(m.channels, t.channel) - m.channels.begin());
      of_channel[channel].push_back(i);
      ordinal.push_back(collectives[channel]);
      if (is_collective(t.kind)) ++collectives[channel];
    }
  }
}

std::vector<std::int64_t> collectives_of(const OverlapPlan& plan,
                                         const std::vector<std::int64_t>& transfers) {
  std::vector<std::int64_t> collectives;
  std::ranges::copy_if(transfers, std::back_inserter(collectives),
                       [&](std::int64_t i) { return is_collective(plan.transfers[index(i)].kind); });
  return collectives;
}

/// Chunk sizes of a reduce-scatter or all-gather of `count` elements, which are equal where they are not
/// given.
std::vector<std::int64_t> chunks(const OverlapPlan& plan, const std::vector<std::int64_t>& counts,
                                 std::int64_t count) {
  if (!counts.empty()) return counts;
  return std::vector<std::int64_t>(index(plan.world_size), count / plan.world_size);
}

/// Rank r's transfer `b` against rank 0's `a`: same kind and size.
Verdict compare_collective(Plans plans, std::size_t r, std::int64_t a, std::int64_t b) {
  const Transfer& x = plans[0].transfers[index(a)];
  const Transfer& y = plans[r].transfers[index(b)];
  const auto differ = [&](const char* what, std::int64_t mine, std::int64_t other) {
    return no("channel {}: {} of rank 0 has {} {}, but {} of rank {} has {}", x.channel,
              describe(plans[0], a), what, mine, describe(plans[r], b), r, other);
  };
  if (x.kind != y.kind) {
    return no("channel {}: rank 0 has {} where rank {} has {}", x.channel, describe(plans[0], a), r,
              describe(plans[r], b));
  }
  if (x.kind == TransferKind::kAllReduce && x.source.count != y.source.count) {
    return differ("a number of elements of", x.source.count, y.source.count);
  }
  const bool scatter = x.kind == TransferKind::kReduceScatter;
  if (!scatter && x.kind != TransferKind::kAllGather) return {};
  const auto mine = scatter ? chunks(plans[0], x.send_counts, x.source.count)
                            : chunks(plans[0], x.receive_counts, x.destination.count);
  const auto other = scatter ? chunks(plans[r], y.send_counts, y.source.count)
                             : chunks(plans[r], y.receive_counts, y.destination.count);
  const auto [at, unused] = std::ranges::mismatch(mine, other);
  if (at == mine.end()) return {};
  const std::string what = "for rank " + std::to_string(at - mine.begin()) + " a chunk of";
  return differ(what.c_str(), *at, other[index(at - mine.begin())]);
}

/// Everybody receives what everybody else sends to it.
Verdict compare_all_to_all(Plans plans, const std::vector<std::int64_t>& transfer_of_rank) {
  for (std::size_t s = 0; s < plans.size(); ++s) {
    for (std::size_t d = 0; d < plans.size(); ++d) {
      const std::int64_t sent = plans[s].transfers[index(transfer_of_rank[s])].send_counts[d];
      const std::int64_t received = plans[d].transfers[index(transfer_of_rank[d])].receive_counts[s];
      if (sent != received) {
        return no("{} of rank {} sends {} elements to rank {}, but {} of rank {} receives {} from it",
                  describe(plans[s], transfer_of_rank[s]), s, sent, d,
                  describe(plans[d], transfer_of_rank[d]), d, received);
      }
    }
  }
  return {};
}

Verdict match_collectives(Plans plans, const Matching& m) {
  for (std::size_t c = 0; c < m.channels.size(); ++c) {
    std::vector<std::vector<std::int64_t>> of_rank;
    for (std::size_t r = 0; r < plans.size(); ++r)
      of_rank.push_back(collectives_of(plans[r], m.transfers[r][c]));
    const std::size_t shared =
        std::ranges::min(of_rank, {}, [](const auto& list) { return list.size(); }).size();
    for (std::size_t i = 0; i < shared; ++i) {
      std::vector<std::int64_t> transfer_of_rank;
      for (std::size_t r = 0; r < plans.size(); ++r) {
        if (Verdict v = compare_collective(plans, r, of_rank[0][i], of_rank[r][i]); !v) return v;
        transfer_of_rank.push_back(of_rank[r][i]);
      }
      if (plans[0].transfers[index(of_rank[0][i])].kind == TransferKind::kAllToAll) {
        if (Verdict v = compare_all_to_all(plans, transfer_of_rank); !v) return v;
      }
    }
    for (std::size_t r = 1; r < plans.size(); ++r) {
      if (of_rank[r].size() != of_rank[0].size()) {
        return no("channel {}: rank 0 has {} collectives, but rank {} has {}", m.channels[c],
                  of_rank[0].size(), r, of_rank[r].size());
      }
    }
  }
  return {};
}

/// The n-th send from one rank to another on one channel matches the n-th receive there.
Verdict match_point_to_point(Plans plans, Matching& m) {
  struct Pair {
    std::vector<std::int64_t> sends;
    std::vector<std::int64_t> receives;
  };
  std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, Pair>
      pairs;  // (source, destination, channel)
  for (const OverlapPlan& plan : plans) {
    for (std::int64_t i = 0; i < std::ssize(plan.transfers); ++i) {
      const Transfer& t = plan.transfers[index(i)];
      if (t.kind == TransferKind::kSend) pairs[{plan.rank, t.peer, t.channel}].sends.push_back(i);
      if (t.kind == TransferKind::kReceive) pairs[{t.peer, plan.rank, t.channel}].receives.push_back(i);
    }
  }
  for (const auto& [key, pair] : pairs) {
    const auto [source, destination, channel] = key;
    for (std::size_t i = 0; i < std::min(pair.sends.size(), pair.receives.size()); ++i) {
      const std::int64_t sent = plans[index(source)].transfers[index(pair.sends[i])].source.count;
      const std::int64_t received =
          plans[index(destination)].transfers[index(pair.receives[i])].destination.count;
      if (sent != received) {
        return no("{} of rank {} sends {} elements, but {} of rank {} receives {}",
                  describe(plans[index(source)], pair.sends[i]), source, sent,
                  describe(plans[index(destination)], pair.receives[i]), destination, received);
      }
      m.partner[index(source)][index(pair.sends[i])] = {destination, pair.receives[i]};
      m.partner[index(destination)][index(pair.receives[i])] = {source, pair.sends[i]};
    }
    if (pair.sends.size() != pair.receives.size()) {
      return no("channel {}: rank {} sends {} times to rank {}, which receives {} times from it", channel,
                source, pair.sends.size(), destination, pair.receives.size());
    }
  }
  return {};
}

/// One packed segment relative to the region that it is in, in the product's coordinates.
using Summand = std::array<std::int64_t, 5>;

std::vector<Summand> summands(const OverlapPlan& plan, const Facts& facts, const Region& region) {
  std::vector<Summand> list;
  auto it = std::ranges::partition_point(facts.packed,
                                         [&](const PackedPiece& p) { return p.end <= region.offset; });
  for (; it != facts.packed.end() && it->begin < region.offset + region.count; ++it) {
    const Tile& tile = plan.grid.tile(it->tile);
    const PlacementSegment& segment = plan.placement.segments[index(it->segment)];
    list.push_back({it->begin - region.offset, tile.row_begin + segment.row_begin, segment.rows,
                    tile.col_begin, tile.cols});
  }
  return list;
}

}  // namespace

Verdict match_transfers(Plans plans, Matching& matching) {
  collect(plans, matching);
  if (Verdict v = match_collectives(plans, matching); !v) return v;
  return match_point_to_point(plans, matching);
}

Verdict check_summands(Plans plans, std::span<const Facts> facts, const Matching& m) {
  for (std::size_t c = 0; c < m.channels.size(); ++c) {
    const auto first = collectives_of(plans[0], m.transfers[0][c]);
    for (std::size_t i = 0; i < first.size(); ++i) {
      const Transfer& x = plans[0].transfers[index(first[i])];
      if (x.kind != TransferKind::kAllReduce && x.kind != TransferKind::kReduceScatter) continue;
      const bool packed = x.source.buffer == BufferKind::kPacked;
      const auto expected = packed ? summands(plans[0], facts[0], x.source) : std::vector<Summand>{};
      for (std::size_t r = 1; r < plans.size(); ++r) {
        const std::int64_t other = collectives_of(plans[r], m.transfers[r][c])[i];
        const Transfer& y = plans[r].transfers[index(other)];
        const bool same = packed ? y.source.buffer == BufferKind::kPacked &&
                                       summands(plans[r], facts[r], y.source) == expected
                                 : y.source == x.source;
        if (!same) {
          return no("{} of rank 0 and {} of rank {} add up different parts of the product",
                    describe(plans[0], first[i]), describe(plans[r], other), r);
        }
      }
    }
  }
  return {};
}

}  // namespace flashoverlap::plan

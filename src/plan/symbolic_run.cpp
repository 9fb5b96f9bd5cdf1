#include <fmt/format.h>

#include <algorithm>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify_ranks.h"

namespace flashoverlap::plan {
namespace {

class SymbolicRun {
 public:
  SymbolicRun(Plans plans, const Matching& matching) : plans_(plans), matching_(matching) {
    for (const OverlapPlan& plan : plans) {
      ranks_.push_back({.position = 0,
                        .next = std::vector<std::size_t>(matching.channels.size(), 0),
                        .arrived = std::vector<bool>(plan.slices.size(), false)});
      first_gate_.push_back(first_gates(plan));
      passes_.push_back(plan.passes());
    }
  }

  Verdict run() {
    bool progress = true;
    while (progress) {
      progress = false;
      for (std::size_t r = 0; r < ranks_.size(); ++r) progress |= compute(r);
      for (std::size_t c = 0; c < matching_.channels.size(); ++c) {
        for (std::size_t r = 0; r < ranks_.size(); ++r) {
          while (issue(r, c)) progress = true;
        }
      }
    }
    return report();
  }

 private:
  struct Rank {
    std::int64_t position = 0;      ///< Tiles before it are done, all passes one after the other.
    std::vector<std::size_t> next;  ///< Per channel: the transfer that comes next.
    std::vector<bool> arrived;      ///< Per slice.
  };

  static std::vector<std::size_t> first_gates(const OverlapPlan& plan) {
    std::vector<std::size_t> first(index(plan.grid.num_tiles() + 1), 0);
    for (const Gate& gate : plan.gates) ++first[index(gate.tile + 1)];
    for (std::size_t t = 1; t < first.size(); ++t) first[t] += first[t - 1];
    return first;
  }

  [[nodiscard]] std::int64_t num_tiles(std::size_t r) const { return std::ssize(plans_[r].schedule); }
  [[nodiscard]] std::int64_t num_positions(std::size_t r) const {
    return num_tiles(r) * std::ssize(passes_[r]);
  }
  [[nodiscard]] std::int64_t tile_at_position(std::size_t r) const {
    return plans_[r].schedule[index(ranks_[r].position % num_tiles(r))];
  }

  /// The slice that the tile at this rank's position lacks, or -1.
  [[nodiscard]] std::int64_t missing_slice(std::size_t r) const {
    const std::size_t tile = index(tile_at_position(r));
    const std::size_t next_pass = index(ranks_[r].position / num_tiles(r) + 1);
    const bool last = next_pass == passes_[r].size();
    for (std::size_t g = first_gate_[r][tile]; g < first_gate_[r][tile + 1]; ++g) {
      const Gate& gate = plans_[r].gates[g];
      if (!last && (gate.point == GatePoint::kFinish || gate.k_begin >= passes_[r][next_pass])) continue;
      if (!ranks_[r].arrived[index(gate.slice)]) return gate.slice;
    }
    return -1;
  }

  bool compute(std::size_t r) {
    const std::int64_t begin = ranks_[r].position;
    while (ranks_[r].position < num_positions(r) && missing_slice(r) < 0) ++ranks_[r].position;
    return ranks_[r].position > begin;
  }

  /// The transfer at the head of a channel, or -1.
  [[nodiscard]] std::int64_t head(std::size_t r, std::size_t c) const {
    const auto& list = matching_.transfers[r][c];
    return ranks_[r].next[c] < list.size() ? list[ranks_[r].next[c]] : -1;
  }

  [[nodiscard]] bool triggered(std::size_t r, std::int64_t transfer) const {
    const Trigger& trigger = plans_[r].transfers[index(transfer)].trigger;
    if (trigger.kind == TriggerKind::kSlice) return ranks_[r].arrived[index(trigger.index)];
    if (trigger.kind == TriggerKind::kStart) return true;
    const WaveGroup& group = plans_[r].groups[index(trigger.index)];
    return last_pass_position(r) >= group.first_position + group.num_tiles;
  }

  /// Tiles are done in the last pass.
  [[nodiscard]] std::int64_t last_pass_position(std::size_t r) const {
    return ranks_[r].position - (num_positions(r) - num_tiles(r));
  }

  void finish(std::size_t r, std::size_t c) {
    const Transfer& t = plans_[r].transfers[index(head(r, c))];
    if (t.slice >= 0) ranks_[t.kind == TransferKind::kPut ? index(t.peer) : r].arrived[index(t.slice)] = true;
    ++ranks_[r].next[c];
  }

  /// The first rank that is not ready for the collective at the head of rank r's channel, or -1.
  [[nodiscard]] std::int64_t not_at_collective(std::size_t r, std::size_t c) const {
    const std::int64_t ordinal = matching_.ordinal[r][index(head(r, c))];
    for (std::size_t other = 0; other < ranks_.size(); ++other) {
      const std::int64_t i = head(other, c);
      const bool there = i >= 0 && is_collective(plans_[other].transfers[index(i)].kind) &&
                         matching_.ordinal[other][index(i)] == ordinal && triggered(other, i);
      if (!there) return static_cast<std::int64_t>(other);
    }
    return -1;
  }

  bool issue(std::size_t r, std::size_t c) {
    const std::int64_t i = head(r, c);
    if (i < 0 || !triggered(r, i)) return false;
    const TransferKind kind = plans_[r].transfers[index(i)].kind;
    if (is_collective(kind)) {
      if (not_at_collective(r, c) >= 0) return false;
      for (std::size_t other = 0; other < ranks_.size(); ++other) finish(other, c);
      return true;
    }
    if (kind != TransferKind::kPut) {
      const TransferId partner = matching_.partner[r][index(i)];
      const std::size_t peer = index(partner.rank);
      if (head(peer, c) != partner.transfer || !triggered(peer, partner.transfer)) return false;
      finish(peer, c);
    }
    finish(r, c);
    return true;
  }

  /// What rank r's channel c waits for.
  [[nodiscard]] std::string wait_of_channel(std::size_t r, std::size_t c) const {
    const std::int64_t i = head(r, c);
    const Transfer& t = plans_[r].transfers[index(i)];
    std::string text =
        fmt::format("rank {} channel {}: {} waits for ", r, matching_.channels[c], describe(plans_[r], i));
    if (!triggered(r, i)) {
      if (t.trigger.kind == TriggerKind::kSlice) return text + fmt::format("slice {}", t.trigger.index);
      const WaveGroup& group = plans_[r].groups[index(t.trigger.index)];
      const std::int64_t done =
          std::clamp<std::int64_t>(last_pass_position(r) - group.first_position, 0, group.num_tiles);
      return text + fmt::format("group {} ({} of {} tiles done)", t.trigger.index, done, group.num_tiles);
    }
    if (is_collective(t.kind)) return text + fmt::format("rank {}", not_at_collective(r, c));
    const TransferId partner = matching_.partner[r][index(i)];
    return text + fmt::format("{} of rank {}", describe(plans_[index(partner.rank)], partner.transfer),
                              partner.rank);
  }

  [[nodiscard]] Verdict report() const {
    constexpr std::size_t kMaxWaits = 8;
    std::vector<std::string> waits;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].position < num_positions(r)) {
        waits.push_back(fmt::format("rank {}: tile {} at position {} waits for slice {} from rank {}", r,
                                    tile_at_position(r), ranks_[r].position % num_tiles(r), missing_slice(r),
                                    plans_[r].slices[index(missing_slice(r))].source));
      }
      for (std::size_t c = 0; c < matching_.channels.size(); ++c) {
        if (head(r, c) >= 0) waits.push_back(wait_of_channel(r, c));
      }
    }
    if (waits.empty()) return {};
    std::string reason = "deadlock";
    for (std::size_t i = 0; i < std::min(waits.size(), kMaxWaits); ++i)
      reason += (i == 0 ? ": " : "; ") + waits[i];
    if (waits.size() > kMaxWaits) reason += fmt::format("; and {} more", waits.size() - kMaxWaits);
    return {reason};
  }

  Plans plans_;
  const Matching& matching_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<std::size_t>> first_gate_;
  std::vector<std::vector<std::int64_t>> passes_;  // by rank
};

}  // namespace

Verdict run_symbolically(Plans plans, const Matching& matching) {
  return SymbolicRun(plans, matching).run();
}

}  // namespace flashoverlap::plan

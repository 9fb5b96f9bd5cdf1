#include <algorithm>
#include <utility>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify_ranks.h"

/// Where the elements of received buffers come from.
namespace flashoverlap::plan {
namespace {

class Arrivals {
 public:
  Arrivals(Plans plans, const Matching& matching, BufferKind from)
      : plans_(plans), matching_(matching), from_(from), by_rank_(plans.size()) {}

  std::vector<std::vector<Arrival>> collect() {
    for (std::size_t r = 0; r < plans_.size(); ++r) {
      for (std::int64_t i = 0; i < std::ssize(plans_[r].transfers); ++i) {
        const Transfer& t = plans_[r].transfers[index(i)];
        if (t.kind == TransferKind::kAllToAll) add_all_to_all(r, i);
        if (t.kind == TransferKind::kSend) {
          const TransferId partner = matching_.partner[r][index(i)];
          const std::size_t peer = index(partner.rank);
          add(peer, plans_[peer].transfers[index(partner.transfer)].destination, r, t.source);
        }
        if (t.kind == TransferKind::kPut) add(index(t.peer), t.destination, r, t.source);
      }
    }
    for (auto& list : by_rank_) std::ranges::sort(list, {}, &Arrival::begin);
    return std::move(by_rank_);
  }

 private:
  void add(std::size_t r, const Region& destination, std::size_t source_rank, const Region& source) {
    if (destination.buffer != BufferKind::kReceived || source.buffer != from_ || destination.count == 0) {
      return;
    }
    by_rank_[r].push_back(
        {destination.offset, destination.offset + destination.count, source_rank, source.offset});
  }

  /// Rank r's part of one all-to-all, chunk by chunk.
  void add_all_to_all(std::size_t r, std::int64_t i) {
    const Transfer& t = plans_[r].transfers[index(i)];
    const auto channel =
        index(std::ranges::lower_bound(matching_.channels, t.channel) - matching_.channels.begin());
    Region destination{t.destination.buffer, t.destination.offset, 0};
    for (std::size_t s = 0; s < plans_.size(); ++s) {
      destination.count = t.receive_counts[s];
      const Transfer& sent = matching_transfer(s, channel, matching_.ordinal[r][index(i)]);
      Region source{sent.source.buffer, sent.source.offset, destination.count};
      for (std::size_t d = 0; d < r; ++d) source.offset += sent.send_counts[d];
      add(r, destination, s, source);
      destination.offset += destination.count;
    }
  }

  [[nodiscard]] const Transfer& matching_transfer(std::size_t r, std::size_t channel,
                                                  std::int64_t ordinal) const {
    for (const std::int64_t i : matching_.transfers[r][channel]) {
      const Transfer& t = plans_[r].transfers[index(i)];
      if (is_collective(t.kind) && matching_.ordinal[r][index(i)] == ordinal) return t;
    }
    core::fail(ErrorKind::kInternal, "rank {} has no collective {} although transfers match", r, ordinal);
  }

  Plans plans_;
  const Matching& matching_;
  BufferKind from_;
  std::vector<std::vector<Arrival>> by_rank_;
};

}  // namespace

std::vector<std::vector<Arrival>> arrivals_from(Plans plans, const Matching& matching, BufferKind from) {
  return Arrivals(plans, matching, from).collect();
}

}  // namespace flashoverlap::plan

#include "comm/mpi/movement.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "comm/rank_sum.h"

namespace flashoverlap::comm::mpi {
namespace {

using Counts = std::vector<std::int64_t>;

std::byte* bytes_at(const void* buffer) {
  return static_cast<std::byte*>(const_cast<void*>(buffer));
}

std::size_t at(int rank) {
  return static_cast<std::size_t>(rank);
}

/// Chunks that lie one after the other, in bytes.
struct Chunks {
  Chunks(const Counts& counts, DType dtype) {
    std::int64_t begin = 0;
    for (const std::int64_t count : counts) {
      begins.push_back(begin);
      sizes.push_back(count * size_of(dtype));
      begin += sizes.back();
    }
  }
  std::vector<std::int64_t> begins;
  std::vector<std::int64_t> sizes;
};

class Direct final : public Movement {
 public:
  explicit Direct(Requests& requests) : requests_(requests) {}

  void add(bool is_receive, int peer, int tag, std::byte* data, std::int64_t bytes) {
    flows_.push_back(
        std::make_unique<Flow>(requests_, Flow::Spec{is_receive, peer, tag, data, bytes, false}));
  }
  void copy_own(std::byte* to, const std::byte* from, std::int64_t bytes) {
    if (to != from && bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }

  void start() override {
    for (const auto& flow : flows_) {
      if (flow->spec().is_receive) flow->allow_all();
    }
    for (const auto& flow : flows_) flow->allow_all();
  }

  [[nodiscard]] std::vector<const Flow*> flows() const override {
    std::vector<const Flow*> all;
    for (const auto& flow : flows_) all.push_back(flow.get());
    return all;
  }

 private:
  Requests& requests_;
  std::vector<std::unique_ptr<Flow>> flows_;
};

// Peers in an order that spreads load: rank + 1, rank + 2, …
std::vector<int> peers_of(const Place& place) {
  std::vector<int> peers;
  for (int step = 1; step < place.size; ++step) peers.push_back((place.rank + step) % place.size);
  return peers;
}

std::unique_ptr<Movement> all_gather(const Call& call, const Place& place, Requests& requests) {
  const Chunks chunks(call.receive_counts, call.dtype);
  auto movement = std::make_unique<Direct>(requests);
  const std::size_t own = at(place.rank);
  std::byte* received = bytes_at(call.receive);
  for (const int peer : peers_of(place)) {
    movement->add(true, peer, place.scatter_tag, received + chunks.begins[at(peer)], chunks.sizes[at(peer)]);
    movement->add(false, peer, place.scatter_tag, bytes_at(call.send), chunks.sizes[own]);
  }
  movement->copy_own(received + chunks.begins[own], bytes_at(call.send), chunks.sizes[own]);
  return movement;
}

std::unique_ptr<Movement> all_to_all(const Call& call, const Place& place, Requests& requests) {
  const Chunks sent(call.send_counts, call.dtype);
  const Chunks received(call.receive_counts, call.dtype);
  auto movement = std::make_unique<Direct>(requests);
  for (const int peer : peers_of(place)) {
    movement->add(true, peer, place.scatter_tag, bytes_at(call.receive) + received.begins[at(peer)],
                  received.sizes[at(peer)]);
    movement->add(false, peer, place.scatter_tag, bytes_at(call.send) + sent.begins[at(peer)],
                  sent.sizes[at(peer)]);
  }
  const std::size_t own = at(place.rank);
  // When the two differ, the ranks' calls do not match and the call will fail.
  movement->copy_own(bytes_at(call.receive) + received.begins[own], bytes_at(call.send) + sent.begins[own],
                     std::min(received.sizes[own], sent.sizes[own]));
  return movement;
}

/// All-reduce and reduce-scatter; see Movement.
class Reduce final : public Movement {
 public:
  Reduce(const Call& call, const Place& place, Requests& requests, StagingPool& pool)
      : call_(call),
        place_(place),
        gathers_(call.kind == CallKind::kAllReduce),
        one_step_(gathers_ && call.send_counts[0] * size_of(call.dtype) <= kOneStepBytes),
        chunks_(one_step_ ? call.send_counts : chunk_counts(call, place.size), call.dtype),
        own_bytes_(chunks_.sizes[chunk_of(place.rank)]),
        stage_bytes_(std::min(own_bytes_, kWindow * kSegmentBytes)),
        staging_(pool, static_cast<std::size_t>(stage_bytes_) * at(place.size - 1)) {
    for (const int peer : peers_of(place)) add_peer(peer, requests);
  }

  void start() override {
    for (Peer& peer : peers_) peer.terms_in->allow(kWindow);
    for (Peer& peer : peers_) peer.terms_out->allow_all();
    if (gathers_ && !one_step_ && call_.send != call_.receive) {
      for (Peer& peer : peers_) peer.sums_in->allow_all();
    }
    if (peers_.empty()) sum_what_has_come();
  }

  void abandon_memory() override { staging_.abandon(); }

  [[nodiscard]] std::vector<const Flow*> flows() const override {
    std::vector<const Flow*> all;
    for (const Peer& peer : peers_) {
      for (const auto* flow : {&peer.terms_in, &peer.terms_out, &peer.sums_in, &peer.sums_out}) {
        if (*flow) all.push_back(flow->get());
      }
    }
    return all;
  }

 private:
  struct Peer {
    int rank;
    std::byte* staging;  // The latest kWindow segments of its terms.
    std::unique_ptr<Flow> terms_in;
    std::unique_ptr<Flow> terms_out;
    std::unique_ptr<Flow> sums_in;
    std::unique_ptr<Flow> sums_out;
  };

  // An all-reduce's chunks begin on cache lines, so that two ranks' sums never share one.
  static Counts chunk_counts(const Call& call, int ranks) {
    if (call.kind == CallKind::kReduceScatter) return call.send_counts;
    constexpr std::int64_t kLineElements = 64;
    Counts counts;
    std::int64_t left = call.send_counts[0];
    const std::int64_t share = (left / ranks + kLineElements - 1) / kLineElements * kLineElements;
    for (int rank = 0; rank < ranks; ++rank) {
      counts.push_back(rank + 1 == ranks ? left : std::min(left, share));
      left -= counts.back();
    }
    return counts;
  }

  // In one step there is one chunk, and everybody owns it.
  [[nodiscard]] std::size_t chunk_of(int rank) const { return one_step_ ? 0 : at(rank); }
  [[nodiscard]] std::byte* own_result() const {
    const bool whole = gathers_;
    return bytes_at(call_.receive) + (whole ? chunks_.begins[chunk_of(place_.rank)] : 0);
  }

  void add_peer(int rank, Requests& requests) {
    std::byte* const staging = staging_.data() + stage_bytes_ * static_cast<std::int64_t>(peers_.size());
    Peer peer{rank, staging, {}, {}, {}, {}};
    const std::size_t chunk = chunk_of(rank);
    const auto on_terms = [this] { sum_what_has_come(); };
    peer.terms_in = std::make_unique<Flow>(
        requests, Flow::Spec{true, rank, place_.scatter_tag, staging, own_bytes_, true}, on_terms);
    const std::size_t index = peers_.size();
    peer.terms_out = std::make_unique<Flow>(
        requests,
        Flow::Spec{false, rank, place_.scatter_tag, bytes_at(call_.send) + chunks_.begins[chunk],
                   chunks_.sizes[chunk], false},
        [this, index] { after_sending_terms(peers_[index]); });
    if (gathers_ && !one_step_) {
      peer.sums_in = std::make_unique<Flow>(
          requests, Flow::Spec{true, rank, place_.gather_tag, bytes_at(call_.receive) + chunks_.begins[chunk],
                               chunks_.sizes[chunk], false});
      peer.sums_out = std::make_unique<Flow>(
          requests, Flow::Spec{false, rank, place_.gather_tag, own_result(), own_bytes_, false});
    }
    peers_.push_back(std::move(peer));
  }

  void after_sending_terms(Peer& peer) {
    // In place, a segment may be overwritten by its sum only once it has been sent.
    if (peer.sums_in) peer.sums_in->allow(peer.terms_out->completed());
    if (one_step_) sum_what_has_come();
  }

  [[nodiscard]] bool next_segment_is_here() const {
    return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
      if (one_step_ && !peer.terms_out->done()) return false;
      return peer.terms_in->completed() > summed_;
    });
  }

  void sum_what_has_come() {
    while (summed_ < segments_of(own_bytes_) && next_segment_is_here()) {
      sum_segment(summed_++);
      for (Peer& peer : peers_) {
        peer.terms_in->allow(summed_ + kWindow);
        if (peer.sums_out) peer.sums_out->allow(summed_);
      }
    }
  }

  void sum_segment(std::int64_t segment) {
    const std::int64_t begin = segment * kSegmentBytes;
    std::vector<const std::byte*> from(at(place_.size));
    from[at(place_.rank)] = bytes_at(call_.send) + chunks_.begins[chunk_of(place_.rank)] + begin;
    for (const Peer& peer : peers_) {
      from[at(peer.rank)] = peer.staging + segment % kWindow * kSegmentBytes;
    }
    std::byte* const to = own_result() + begin;
    const std::int64_t bytes = std::min(kSegmentBytes, own_bytes_ - begin);
    sum_in_rank_order(from, {&to, 1}, call_.dtype, bytes / size_of(call_.dtype));
  }

  const Call& call_;
  const Place place_;
  const bool gathers_;
  const bool one_step_;
  const Chunks chunks_;
  const std::int64_t own_bytes_;
  const std::int64_t stage_bytes_;  // Of each peer.
  StagingPool::Block staging_;
  std::vector<Peer> peers_;
  std::int64_t summed_ = 0;  // Segments of the own chunk.
};

}  // namespace

std::unique_ptr<Movement> make_movement(const Call& call, const Place& place, int peer, Requests& requests,
                                        StagingPool& staging) {
  switch (call.kind) {
    case CallKind::kAllReduce:
    case CallKind::kReduceScatter:
      return std::make_unique<Reduce>(call, place, requests, staging);
    case CallKind::kAllGather:
      return all_gather(call, place, requests);
    case CallKind::kAllToAll:
      return all_to_all(call, place, requests);
    case CallKind::kSend:
    case CallKind::kReceive: {
      const bool is_receive = call.kind == CallKind::kReceive;
      const auto& counts = is_receive ? call.receive_counts : call.send_counts;
      auto movement = std::make_unique<Direct>(requests);
      movement->add(is_receive, peer, place.scatter_tag, bytes_at(is_receive ? call.receive : call.send),
                    counts[0] * size_of(call.dtype));
      return movement;
    }
    default:
      return nullptr;
  }
}

}  // namespace flashoverlap::comm::mpi

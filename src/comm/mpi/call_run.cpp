#include "comm/mpi/call_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/mpi/backoff.h"
#include "comm/mpi/service.h"
#include "core/fail.h"

namespace flashoverlap::comm::mpi {
namespace {

using namespace std::chrono_literals;

// After a failure: for messages that are on their way into or out of the caller's buffers.
constexpr auto kWithdrawWithin = 1s;

}  // namespace

std::vector<std::string> CallRun::make(MpiGroup& group, const Issued& issued,
                                       std::chrono::milliseconds timeout) {
  group.world().throw_if_failed();
  std::unique_ptr<CallRun> run(new CallRun(group, issued));
  struct Shown {
    MpiWorld& world;
    std::shared_ptr<Pending> pending;
    ~Shown() { world.leave(pending); }
  };
  group.world().enter(run->pending_);
  const Shown shown{group.world(), run->pending_};
  try {
    run->start();
    run->wait(timeout);
    return run->payloads();
  } catch (const Error& error) {
    // A failure of MPI itself is news to the others; for all else this does nothing.
    if (!group.world().failed()) group.world().abort(error.what());
    run->requests_.withdraw(Clock::now() + kWithdrawWithin);
    if (!run->requests_.empty()) {
      // MPI may still touch this memory: it must stay.
      if (run->movement_) run->movement_->abandon_memory();
      static_cast<void>(run.release());
      Service::instance().note_lost_rank();
    }
    throw;
  }
}

CallRun::CallRun(MpiGroup& group, const Issued& issued)
    : group_(group),
      issued_(issued),
      call_(*issued_.call),
      requests_(group.communicator()),
      own_header_(encode(call_)),
      pending_(std::make_shared<Pending>()) {
  pending_->call = issued_.call;
  pending_->since = Clock::now();
  const std::size_t header_bytes = max_header_bytes(group.size());
  for (const int rank : issued_.peers) {
    Peer& peer = peers_.emplace_back();
    peer.rank = rank;
    peer.needs_header = call_.kind != CallKind::kSend;
    if (peer.needs_header) peer.header_bytes.resize(header_bytes);
    pending_->peers.emplace_back().world_rank = group.world_rank(rank);
  }
  const bool pair = is_pair();
  const Place place{group.rank(), group.size(),
                    group.tag(issued_.number, pair ? MessageKind::kPairData : MessageKind::kData),
                    group.tag(issued_.number, MessageKind::kSum)};
  movement_ = make_movement(call_, place, pair && !peers_.empty() ? peers_.front().rank : group.rank(),
                            requests_, group.world().staging());
  if (movement_) {
    for (const Flow* flow : movement_->flows()) {
      for (std::size_t i = 0; i < peers_.size(); ++i) {
        if (peers_[i].rank != flow->spec().peer) continue;
        Pending::Peer& shown = pending_->peers[i];
        (flow->spec().is_receive ? shown.segments_to_receive : shown.segments_to_send) +=
            flow->num_segments();
      }
    }
  }
}

bool CallRun::is_pair() const {
  return call_.kind == CallKind::kSend || call_.kind == CallKind::kReceive;
}

void CallRun::start() {
  const MessageKind kind = is_pair()                           ? MessageKind::kPairHeader
                           : call_.kind == CallKind::kSubgroup ? MessageKind::kSubgroup
                                                               : MessageKind::kHeader;
  const int tag = group_.tag(issued_.number, kind);
  for (Peer& peer : peers_) {
    if (!peer.needs_header) continue;
    requests_.receive(peer.header_bytes.data(), static_cast<std::int64_t>(peer.header_bytes.size()),
                      peer.rank, tag, [this, &peer](int bytes) { take_header(peer, bytes); });
  }
  for (const Peer& peer : peers_) {
    if (call_.kind == CallKind::kReceive) continue;
    requests_.send(own_header_.data(), static_cast<std::int64_t>(own_header_.size()), peer.rank, tag,
                   [](int) {});
  }
  if (movement_) movement_->start();
  if (call_.payload.size() <= kInlinePayload) return;
  for (Peer& peer : peers_) {
    peer.payload_out = std::make_unique<Flow>(
        requests_, Flow::Spec{false, peer.rank, group_.tag(issued_.number, MessageKind::kPayload),
                              reinterpret_cast<std::byte*>(const_cast<char*>(call_.payload.data())),
                              static_cast<std::int64_t>(call_.payload.size()), false});
    peer.payload_out->allow_all();
  }
}

void CallRun::take_header(Peer& peer, int bytes) {
  peer.header =
      decode(std::string_view(peer.header_bytes).substr(0, static_cast<std::size_t>(bytes)), peer.rank);
  group_.world().note_seen(group_.world_rank(peer.rank), peer.header->call);
  const auto index = static_cast<std::size_t>(
      std::find_if(peers_.begin(), peers_.end(), [&](const Peer& other) { return &other == &peer; }) -
      peers_.begin());
  pending_->peers[index].has_arrived = true;
  compare_with(peer);
  if (peer.header->payload_follows()) {
    receive_payload(peer);
  } else {
    peer.payload = peer.header->call.payload;
  }
  if (all_headers_are_here()) compare_all();
}

void CallRun::receive_payload(Peer& peer) {
  peer.payload.resize(static_cast<std::size_t>(peer.header->payload_size));
  peer.payload_in = std::make_unique<Flow>(
      requests_,
      Flow::Spec{true, peer.rank, group_.tag(issued_.number, MessageKind::kPayload),
                 reinterpret_cast<std::byte*>(peer.payload.data()), peer.header->payload_size, false});
  peer.payload_in->allow_all();
}

void CallRun::compare_with(const Peer& peer) {
  const Call& theirs = peer.header->call;
  if (is_pair() || same_collective(call_, theirs)) return;
  const int own_rank = group_.world_rank(group_.rank());
  const int their_rank = group_.world_rank(peer.rank);
  const auto text = [](int rank, const Call& call) {
    return fmt::format("rank {} calls {}", rank, describe(call));
  };
  const std::string own = text(own_rank, call_);
  const std::string other = text(their_rank, theirs);
  group_.world().fail_all(ErrorKind::kCommunication,
                          "the ranks' calls do not match: " +
                              (own_rank < their_rank ? own + ", but " + other : other + ", but " + own));
}

bool CallRun::all_headers_are_here() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return !peer.needs_header || peer.header; });
}

// What can be compared only once all calls are known.
void CallRun::compare_all() {
  if (call_.kind != CallKind::kAllToAll && call_.kind != CallKind::kReceive) return;
  const auto shared = [](const Call& call) { return std::make_shared<const Call>(call); };
  std::vector<std::shared_ptr<const Call>> calls;
  std::vector<int> ranks;
  if (call_.kind == CallKind::kReceive) {
    calls = {shared(peers_.front().header->call), issued_.call};
    ranks = {group_.world_rank(peers_.front().rank), group_.world_rank(group_.rank())};
  } else {
    calls.resize(static_cast<std::size_t>(group_.size()));
    calls[static_cast<std::size_t>(group_.rank())] = issued_.call;
    for (const Peer& peer : peers_) calls[static_cast<std::size_t>(peer.rank)] = shared(peer.header->call);
    ranks = group_.members();
  }
  if (const Verdict verdict = counts_that_disagree(calls, ranks); !verdict) {
    group_.world().fail_all(ErrorKind::kCommunication, "the ranks' calls do not match: " + verdict.reason);
  }
}

void CallRun::wait(std::chrono::milliseconds timeout) {
  const Clock::time_point begin = Clock::now();
  Clock::time_point last_progress = begin;
  Backoff backoff;
  while (true) {
    const bool moved = requests_.advance();
    if (moved) {
      last_progress = Clock::now();
      show_progress();
      backoff.reset();
    }
    if (requests_.empty() && requests_.error().empty()) return;
    group_.world().throw_if_failed();
    if (moved) continue;
    if (!requests_.error().empty() && (all_headers_are_here() || requests_.empty())) {
      group_.world().fail_all(
          ErrorKind::kCommunication,
          fmt::format("rank {}: {} failed: {}", group_.world().rank(), describe(call_), requests_.error()));
    }
    // A rank that has not come is late after `timeout`; data may take longer as long as it moves.
    const Clock::time_point since = all_headers_are_here() ? last_progress : begin;
    if (Clock::now() - since > timeout) time_out(begin);
    check_finished_ranks();
    backoff.wait();
  }
}

void CallRun::show_progress() {
  if (!movement_) return;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    std::int64_t received = 0;
    std::int64_t sent = 0;
    for (const Flow* flow : movement_->flows()) {
      if (flow->spec().peer == peers_[i].rank)
        (flow->spec().is_receive ? received : sent) += flow->completed();
    }
    pending_->peers[i].segments_received = received;
    pending_->peers[i].segments_sent = sent;
  }
}

bool CallRun::needs_more_from(const Pending::Peer& peer) const {
  const bool lacks_call = call_.kind != CallKind::kSend && !peer.has_arrived;
  return lacks_call || peer.segments_received < peer.segments_to_receive ||
         peer.segments_sent < peer.segments_to_send;
}

void CallRun::check_finished_ranks() {
  for (const Pending::Peer& peer : pending_->peers) {
    if (!needs_more_from(peer) || !group_.world().finished_before(peer.world_rank)) continue;
    group_.world().fail_all(ErrorKind::kCommunication,
                            fmt::format("rank {}: cannot complete {}: {}", group_.world().rank(),
                                        describe(call_), what_is_missing()));
  }
}

void CallRun::time_out(Clock::time_point begin) {
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  const std::string missing = what_is_missing();
  group_.world().throw_if_failed();
  group_.world().fail_all(ErrorKind::kTimeout,
                          fmt::format("rank {}: time-out after {:.3g} s in {}: {}", group_.world().rank(),
                                      seconds, describe(call_), missing));
}

std::string CallRun::what_is_missing() {
  std::vector<int> ranks;
  for (const Pending::Peer& peer : pending_->peers) {
    if (needs_more_from(peer)) ranks.push_back(peer.world_rank);
  }
  const std::vector<std::string> states = group_.world().whereabouts(ranks);
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto peer = std::find_if(pending_->peers.begin(), pending_->peers.end(),
                                   [&](const Pending::Peer& each) { return each.world_rank == ranks[i]; });
    if (!text.empty()) text += "; ";
    if (peer->has_arrived) {
      text += fmt::format(
          "rank {} arrived, but its data stopped: {} of {} segments came from it, {} of {} went to it",
          ranks[i], peer->segments_received.load(), peer->segments_to_receive, peer->segments_sent.load(),
          peer->segments_to_send);
    } else {
      text += fmt::format("rank {} did not arrive", ranks[i]);
    }
    text += "; " + states[i];
  }
  return text;
}

std::vector<std::string> CallRun::payloads() {
  std::vector<std::string> payloads;
  if (call_.kind != CallKind::kExchangeInteger && call_.kind != CallKind::kExchangeBytes) return payloads;
  payloads.resize(static_cast<std::size_t>(group_.size()));
  payloads[static_cast<std::size_t>(group_.rank())] = call_.payload;
  for (Peer& peer : peers_) payloads[static_cast<std::size_t>(peer.rank)] = std::move(peer.payload);
  return payloads;
}

}  // namespace flashoverlap::comm::mpi

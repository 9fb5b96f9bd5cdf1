#include "comm/tcp/server.h"

#include <poll.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "core/fail.h"

namespace flashoverlap::comm::tcp {
namespace {

/// A client that sends half a message, or does not take one, holds up all others for so long at most.
constexpr std::chrono::seconds kPatience{10};

struct Pending {
  std::string label;
  Deadline deadline;
  std::uint64_t timeout_ms = 0;
  std::vector<std::optional<std::string>> values;  ///< By place in the group.
};

/// An operation's label without the shape that it was called with (ops/agree.h): ranks of one call may have
/// shapes of their own, as the rows of an all-to-all, and where they may not, the call itself says more.
std::string_view without_shape(std::string_view label) {
  return label.substr(0, label.find(" m="));
}

class Server {
 public:
  explicit Server(std::vector<Socket> clients) : clients_(std::move(clients)) {}

  void run() {
    while (std::any_of(clients_.begin(), clients_.end(), [](const Socket& s) { return s.is_open(); })) {
      for (const std::size_t rank : wait_for_input()) take(rank);
      fail_what_is_late();
    }
  }

 private:
  using Key = std::tuple<std::vector<std::uint32_t>, std::uint64_t, std::uint64_t>;

  std::vector<std::size_t> wait_for_input() {
    std::vector<pollfd> entries;
    std::vector<std::size_t> ranks;
    for (std::size_t rank = 0; rank < clients_.size(); ++rank) {
      if (!clients_[rank].is_open()) continue;
      entries.push_back({.fd = clients_[rank].descriptor(), .events = POLLIN, .revents = 0});
      ranks.push_back(rank);
    }
    constexpr int kTickMs = 20;  // How exactly time-outs are kept while something waits.
    (void)::poll(entries.data(), entries.size(), pending_.empty() ? -1 : kTickMs);
    std::vector<std::size_t> ready;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].revents != 0) ready.push_back(ranks[i]);
    }
    return ready;
  }

  void take(std::size_t rank) {
    if (!clients_[rank].is_open()) return;
    try {
      const std::optional<Frame> frame = clients_[rank].receive(Clock::now() + kPatience);
      if (!frame) core::fail(ErrorKind::kCommunication, "it sent half a message");
      if (frame->kind == FrameKind::kAbort) {
        fail_all(ErrorKind::kCommunication, frame->bytes);
      } else if (frame->kind == FrameKind::kExchange) {
        add(rank, decode_request(*frame));
      } else {
        core::fail(ErrorKind::kCommunication, "it sent a second greeting");
      }
    } catch (const Error& error) {
      lose(rank, error.what());
    }
  }

  void add(std::size_t rank, Request request) {
    if (failure_) return send(rank, *failure_);
    const auto place = std::find(request.ranks.begin(), request.ranks.end(), rank);
    if (place == request.ranks.end()) {
      core::fail(ErrorKind::kCommunication, "it calls in a group that it is not in");
    }
    for (const std::uint32_t other : request.ranks) {
      if (other < clients_.size() && clients_[other].is_open()) continue;
      return fail_all(ErrorKind::kCommunication,
                      fmt::format("rank {} waits in '{}' for rank {}, which has closed its connection", rank,
                                  request.label, other));
    }
    const Key key{request.ranks, request.instance, request.number};
    auto [entry, is_first] = pending_.try_emplace(key);
    Pending& pending = entry->second;
    if (is_first) {
      pending.label = request.label;
      pending.timeout_ms = request.timeout_ms;
      pending.deadline = Clock::now() + std::chrono::milliseconds(request.timeout_ms);
      pending.values.resize(request.ranks.size());
    } else if (without_shape(pending.label) != without_shape(request.label)) {
      return fail_all(ErrorKind::kCommunication,
                      fmt::format("the ranks' exchanges do not match: rank {} is in '{}', others are in '{}'",
                                  rank, request.label, pending.label));
    }
    pending.values[static_cast<std::size_t>(place - request.ranks.begin())] = std::move(request.bytes);
    if (std::all_of(pending.values.begin(), pending.values.end(),
                    [](const auto& value) { return value.has_value(); })) {
      complete(entry);
    }
  }

  void complete(std::map<Key, Pending>::iterator entry) {
    const auto& [ranks, instance, number] = entry->first;
    std::vector<std::string> values;
    for (auto& value : entry->second.values) values.push_back(std::move(*value));
    const Frame reply = encode_reply(number, values);
    const std::vector<std::uint32_t> receivers = ranks;
    pending_.erase(entry);
    for (const std::uint32_t rank : receivers) send(rank, reply);
  }

  void send(std::size_t rank, const Frame& frame) {
    if (!clients_[rank].is_open()) return;
    try {
      if (!clients_[rank].send(frame, Clock::now() + kPatience))
        core::fail(ErrorKind::kCommunication, "it takes no messages");
    } catch (const Error& error) {
      lose(rank, error.what());
    }
  }

  /// A rank that is gone fails those that wait for it; one that nobody waits for has just finished.
  void lose(std::size_t rank, const std::string& why) {
    clients_[rank] = Socket();
    for (const auto& [key, pending] : pending_) {
      const auto& ranks = std::get<0>(key);
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
      return fail_all(
          ErrorKind::kCommunication,
          fmt::format("rank {} is gone ({}); others wait for it in '{}'", rank, why, pending.label));
    }
  }

  void fail_what_is_late() {
    const auto now = Clock::now();
    for (const auto& [key, pending] : pending_) {
      if (now < pending.deadline) continue;
      std::string missing;
      for (std::size_t i = 0; i < pending.values.size(); ++i) {
        if (!pending.values[i])
          missing += fmt::format("{}{}", missing.empty() ? "" : ", ", std::get<0>(key)[i]);
      }
      return fail_all(ErrorKind::kTimeout, fmt::format("rank {} did not come to '{}' within {} ms", missing,
                                                       pending.label, pending.timeout_ms));
    }
  }

  void fail_all(ErrorKind kind, const std::string& reason) {
    if (failure_) return;
    failure_ = Frame{.kind = FrameKind::kAbort, .number = static_cast<std::uint64_t>(kind), .bytes = reason};
    pending_.clear();
    for (std::size_t rank = 0; rank < clients_.size(); ++rank) send(rank, *failure_);
  }

  std::vector<Socket> clients_;
  std::map<Key, Pending> pending_;
  std::optional<Frame> failure_;
};

}  // namespace

void serve(std::vector<Socket> clients) {
  Server(std::move(clients)).run();
}

}  // namespace flashoverlap::comm::tcp

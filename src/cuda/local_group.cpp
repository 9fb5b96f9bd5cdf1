#include "local_group.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <thread>

#include "core/fail.h"

namespace flashoverlap::cuda {
namespace {

std::size_t index(int rank) {
  return static_cast<std::size_t>(rank);
}

std::string describe(const LocalCall& call) {
  std::string text(call.kind);
  if (!call.label.operation.empty()) text += fmt::format(" for {}", call.label.operation);
  if (call.label.group >= 0) text += fmt::format(", group {}", call.label.group);
  if (call.label.slice >= 0) text += fmt::format(", slice {}", call.label.slice);
  return text;
}

}  // namespace

std::vector<std::int64_t> counts_with(const std::vector<PeerMessage>& messages, int peer) {
  std::vector<std::int64_t> counts;
  for (const PeerMessage& message : messages) {
    if (message.peer == peer) counts.push_back(message.count);
  }
  return counts;
}

LocalGroup::LocalGroup(std::vector<int> devices, std::chrono::milliseconds timeout)
    : devices_(std::move(devices)),
      timeout_ms_(timeout.count()),
      calls_(devices_.size()),
      arrivals_(devices_.size()) {
  for (const int device : devices_) {
    const DeviceScope scope(device);
    ready_.emplace_back();
    done_.emplace_back();
  }
}

void LocalGroup::throw_if_failed() const {
  if (const auto failure = board_->get()) throw Error(failure->kind, failure->reason);
}

const std::vector<LocalCall>& LocalGroup::meet(int rank, LocalCall call) {
  throw_if_failed();
  calls_[index(rank)] = std::move(call);
  wait_for_all(rank);
  // Every rank sees the same calls and so comes to the same verdict.
  check_match();
  return calls_;
}

void LocalGroup::meet_again(int rank) {
  wait_for_all(rank);
}

void LocalGroup::wait_for_all(int rank) {
  using Clock = std::chrono::steady_clock;
  const std::uint64_t mine = arrivals_[index(rank)].load(std::memory_order_relaxed) + 1;
  arrivals_[index(rank)].store(mine, std::memory_order_release);
  const auto begin = Clock::now();
  const auto all_here = [&] {
    return std::all_of(arrivals_.begin(), arrivals_.end(),
                       [&](const auto& arrival) { return arrival.load(std::memory_order_acquire) >= mine; });
  };
  while (!all_here()) {
    throw_if_failed();
    const auto waited = Clock::now() - begin;
    if (waited > timeout()) fail_for_missing(rank);
    // Ranks that come at about the same time meet within microseconds; a longer wait gives its core away.
    if (waited > std::chrono::microseconds(200)) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else {
      std::this_thread::yield();
    }
  }
}

void LocalGroup::fail_for_missing(int rank) {
  const std::uint64_t mine = arrivals_[index(rank)].load(std::memory_order_relaxed);
  std::string missing;
  for (int r = 0; r < size(); ++r) {
    if (arrivals_[index(r)].load(std::memory_order_acquire) < mine)
      missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
  }
  board_->set({ErrorKind::kTimeout,
               fmt::format("local {} on rank {} of {}: rank {} did not come within {} ms",
                           describe(calls_[index(rank)]), rank, size(), missing, timeout().count())});
  throw_if_failed();
}

void LocalGroup::check_match() const {
  const LocalCall& first = calls_.front();
  for (int r = 0; r < size(); ++r) {
    const LocalCall& call = calls_[index(r)];
    const bool same_counts = first.kind == "all-to-all" || call.send_counts == first.send_counts;
    if (call.kind != first.kind || call.dtype != first.dtype || !same_counts) {
      board_->set({ErrorKind::kCommunication,
                   fmt::format("the ranks' calls do not match: rank 0 calls {} ({}), rank {} calls {} ({}){}",
                               describe(first), name_of(first.dtype), r, describe(call), name_of(call.dtype),
                               same_counts ? "" : " with other counts")});
      throw_if_failed();
    }
  }
  for (int from = 0; from < size(); ++from) {
    for (int to = 0; to < size(); ++to) check_messages(from, to);
  }
  if (first.kind != "all-to-all") return;
  for (int from = 0; from < size(); ++from) {
    for (int to = 0; to < size(); ++to) {
      const std::int64_t sent = calls_[index(from)].send_counts[index(to)];
      const std::int64_t expected = calls_[index(to)].receive_counts[index(from)];
      if (sent != expected) {
        board_->set({ErrorKind::kCommunication,
                     fmt::format("{}: rank {} sends {} elements to rank {}, which expects {}",
                                 describe(first), from, sent, to, expected)});
        throw_if_failed();
      }
    }
  }
}

void LocalGroup::check_messages(int from, int to) const {
  const std::vector<std::int64_t> sent = counts_with(calls_[index(from)].sends, to);
  const std::vector<std::int64_t> expected = counts_with(calls_[index(to)].receives, from);
  if (sent == expected) return;
  board_->set(
      {ErrorKind::kCommunication,
       fmt::format("{}: rank {} sends messages of [{}] elements to rank {}, which expects [{}]",
                   describe(calls_.front()), from, fmt::join(sent, ", "), to, fmt::join(expected, ", "))});
  throw_if_failed();
}

}  // namespace flashoverlap::cuda

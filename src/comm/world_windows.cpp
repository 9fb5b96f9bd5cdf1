#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/world.h"
#include "core/fail.h"

/// Windows of the symmetric heap: memory that a rank opens, and the puts of others into it.
namespace flashoverlap::comm {
namespace {

using std::chrono::steady_clock;

double seconds_since(TimePoint time) {
  return std::chrono::duration<double>(steady_clock::now() - time).count();
}

/// Where the put lands; null for no bytes.
std::byte* target_of(const OpenWindow& open, const Put& put) {
  const auto& buffers = open.window.buffers;
  const bool known = put.buffer >= 0 && put.buffer < std::ssize(buffers);
  const std::int64_t size = known ? buffers[static_cast<std::size_t>(put.buffer)].bytes : 0;
  if (!known || put.offset_bytes < 0 || put.bytes > size || put.offset_bytes > size - put.bytes) {
    core::fail(ErrorKind::kBadArgument,
               "rank {} puts {} bytes at byte {} of buffer {} of rank {}, where {} bytes are open",
               put.source, put.bytes, put.offset_bytes, put.buffer, put.destination, size);
  }
  if (put.bytes == 0) return nullptr;
  return buffers[static_cast<std::size_t>(put.buffer)].data + put.offset_bytes;
}

}  // namespace

void World::open_window(const std::shared_ptr<Group>&, const WindowKey& key, SymmetricHeap::Window window) {
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  auto open = std::make_shared<OpenWindow>();
  for (const std::int64_t puts : window.arrivals_from) open->num_missing += puts;
  open->window = std::move(window);
  open->last_arrival = steady_clock::now();
  windows_[key] = std::move(open);
  windows_changed_.notify_all();
}

void World::put(const std::shared_ptr<Group>& group, const Put& put, std::shared_ptr<const Call> call,
                std::chrono::milliseconds timeout) {
  Lock lock(mutex_);
  throw_if_failed();
  const int source = group->members[static_cast<std::size_t>(put.source)];
  RankState& state = ranks_[static_cast<std::size_t>(source)];
  state.last_issued = state.last_reached = call;
  const std::shared_ptr<OpenWindow> open = wait_for_window(lock, *group, put, *call, timeout);
  std::byte* const to = target_of(*open, put);
  const TimePoint until = reserve_links(*group, put);
  ++open->num_copying;
  lock.unlock();
  if (to != nullptr) std::memcpy(to, put.from, static_cast<std::size_t>(put.bytes));
  lock.lock();
  --open->num_copying;
  windows_changed_.notify_all();
  wait_for_link(lock, until);
  throw_if_failed();
  lock.unlock();
  // The receiver cannot pass its wait before the count below, so what it called for is still there.
  open->window.on_arrival(put.slice);
  lock.lock();
  --open->window.arrivals_from[static_cast<std::size_t>(put.source)];
  --open->num_missing;
  open->last_arrival = steady_clock::now();
  windows_changed_.notify_all();
}

std::shared_ptr<OpenWindow> World::wait_for_window(Lock& lock, const Group& group, const Put& put,
                                                   const Call& call, std::chrono::milliseconds timeout) {
  const TimePoint arrival = steady_clock::now();
  const WindowKey key{group.id, put.destination, put.number};
  const int source = group.members[static_cast<std::size_t>(put.source)];
  const int peer = group.members[static_cast<std::size_t>(put.destination)];
  while (true) {
    throw_if_failed();
    if (const auto found = windows_.find(key); found != windows_.end()) return found->second;
    std::vector<int> named{source};
    const RankState& state = ranks_[static_cast<std::size_t>(peer)];
    if (state.finished) {
      fail_all(ErrorKind::kCommunication, peer,
               fmt::format("rank {}: cannot complete {}: rank {} did not open its memory{}", source,
                           describe(call), peer, state_of(peer, named)));
    }
    const TimePoint deadline = std::max(arrival, state.busy_until) + timeout;
    if (steady_clock::now() >= deadline) {
      fail_all(ErrorKind::kTimeout, -1,
               fmt::format("rank {}: time-out after {:.3g} s in {}: rank {} did not open its memory{}",
                           source, seconds_since(arrival), describe(call), peer, state_of(peer, named)));
    }
    windows_changed_.wait_until(lock, deadline);
  }
}

TimePoint World::reserve_links(const Group& group, const Put& put) {
  const TimePoint now = steady_clock::now();
  const bool paced = link_model_.bandwidth_gbps > 0 || link_model_.latency_us > 0;
  if (!paced || put.bytes == 0 || put.source == put.destination) return now;
  const auto source = static_cast<std::size_t>(group.members[static_cast<std::size_t>(put.source)]);
  const auto destination = static_cast<std::size_t>(group.members[static_cast<std::size_t>(put.destination)]);
  const TimePoint end =
      book_put(link_model_, links_[source], links_[destination], now, static_cast<double>(put.bytes));
  for (const std::size_t rank : {source, destination}) {
    ranks_[rank].busy_until = std::max(ranks_[rank].busy_until, end);
  }
  return end;
}

TimePoint World::latest_busy() const {
  TimePoint latest{};
  for (const RankState& state : ranks_) latest = std::max(latest, state.busy_until);
  return latest;
}

int World::gone_debtor(const Group& group, const OpenWindow& open) const {
  for (std::size_t rank = 0; rank < group.members.size(); ++rank) {
    const int member = group.members[rank];
    if (open.window.arrivals_from[rank] > 0 && ranks_[static_cast<std::size_t>(member)].finished)
      return member;
  }
  return -1;
}

std::string World::who_owes(const Group& group, const OpenWindow& open, int waiting) const {
  std::string text;
  std::vector<int> named{waiting};
  for (std::size_t rank = 0; rank < group.members.size(); ++rank) {
    const std::int64_t puts = open.window.arrivals_from[rank];
    if (puts == 0) continue;
    const int member = group.members[rank];
    if (member == waiting) continue;  // it knows
    if (!text.empty()) text += "; ";
    text += fmt::format("rank {} owes {} puts", member, puts);
    if (std::ranges::find(named, member) == named.end()) {
      named.push_back(member);
      text += state_of(member, named);
    }
  }
  return text;
}

void World::await_arrivals(const std::shared_ptr<Group>& group, const WindowKey& key,
                           std::shared_ptr<const Call> call, std::chrono::milliseconds timeout) {
  Lock lock(mutex_);
  throw_if_failed();
  const auto found = windows_.find(key);
  if (found == windows_.end()) return;  // closed: the run has failed
  const std::shared_ptr<OpenWindow> open = found->second;
  const int waiting = group->members[static_cast<std::size_t>(key.rank)];
  const TimePoint begin = steady_clock::now();
  while (open->num_missing > 0) {
    throw_if_failed();
    const TimePoint deadline = std::max(std::max(begin, open->last_arrival), latest_busy()) + timeout;
    if (const int gone = gone_debtor(*group, *open); gone >= 0) {
      fail_all(ErrorKind::kCommunication, gone,
               fmt::format("rank {}: cannot complete {}: {}", waiting, describe(*call),
                           who_owes(*group, *open, waiting)));
    }
    if (steady_clock::now() >= deadline) {
      fail_all(
          ErrorKind::kTimeout, -1,
          fmt::format("rank {}: time-out after {:.3g} s in {}: {}", waiting,
                      seconds_since(open->last_arrival), describe(*call), who_owes(*group, *open, waiting)));
    }
    windows_changed_.wait_until(lock, deadline);
  }
}

void World::close_window(const WindowKey& key) noexcept {
  Lock lock(mutex_);
  const auto found = windows_.find(key);
  if (found == windows_.end()) return;
  const std::shared_ptr<OpenWindow> open = found->second;
  // A copy only moves memory and so comes to an end.
  windows_changed_.wait(lock, [&] { return open->num_copying == 0; });
  windows_.erase(key);
}

}  // namespace flashoverlap::comm

#include "comm/world.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "core/watchdog.h"
#include "flashoverlap/watchdog.h"

namespace flashoverlap::comm {
namespace {

using std::chrono::steady_clock;

std::vector<int> first_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::string two_calls(const Meeting& meeting, std::size_t a, std::size_t b) {
  return fmt::format("rank {} calls {}, but rank {} calls {}", meeting.participants[a],
                     describe(*meeting.calls[a]), meeting.participants[b], describe(*meeting.calls[b]));
}

bool is_paced(const Call& call) {
  return call.kind != CallKind::kExchangeInteger && call.kind != CallKind::kExchangeBytes &&
         call.kind != CallKind::kSubgroup;
}

}  // namespace

Group::Group(std::int64_t group_id, std::vector<int> world_ranks)
    : id(group_id), members(std::move(world_ranks)), collectives(members.size(), 0) {}

World::World(int size, const LinkModel& link)
    : link_model_(link),
      whole_(std::make_shared<Group>(0, first_ranks(size))),
      ranks_(static_cast<std::size_t>(size)),
      links_(static_cast<std::size_t>(size)) {}

// Issuing.

Issued World::issue(const std::shared_ptr<Group>& group, int group_rank, std::shared_ptr<const Call> call,
                    const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  Issued issued{group, {group->id, MeetingKind::kCollective, {}, 0}, {}, 0, std::move(call)};
  const CallKind kind = issued.call->kind;
  if (kind == CallKind::kSend || kind == CallKind::kReceive) {
    auto& counters = kind == CallKind::kSend ? group->sends : group->receives;
    issued.key.kind = MeetingKind::kPair;
    issued.key.ranks = issued.participants = ranks;
    issued.key.number = counters[{ranks[0], ranks[1]}]++;
    issued.slot = kind == CallKind::kSend ? 0 : 1;
  } else if (kind == CallKind::kSubgroup) {
    issued.key.kind = MeetingKind::kSubgroup;
    issued.key.ranks = issued.participants = ranks;
    issued.key.number = group->subgroups[{group_rank, ranks}]++;
    issued.slot = static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), group_rank) - ranks.begin());
  } else {
    issued.participants = first_ranks(static_cast<int>(group->members.size()));
    issued.key.number = group->collectives[static_cast<std::size_t>(group_rank)]++;
    issued.slot = static_cast<std::size_t>(group_rank);
  }
  ranks_[static_cast<std::size_t>(world_rank(issued))].last_issued = issued.call;
  return issued;
}

int World::world_rank(const Issued& issued) const {
  return issued.group->members[static_cast<std::size_t>(issued.participants[issued.slot])];
}

// Meeting.

std::shared_ptr<const Meeting> World::meet(const Issued& issued, std::chrono::milliseconds timeout) {
  Lock lock(mutex_);
  throw_if_failed();
  const std::shared_ptr<Meeting> meeting = arrive(issued);
  if (!meeting->ready) wait_for_all(lock, *meeting, issued, timeout);
  do_share(lock, *meeting);
  wait_until_done(lock, *meeting);
  leave(*meeting);
  if (!meeting->completions.empty()) wait_for_link(lock, meeting->completions[issued.slot]);
  return meeting;
}

std::shared_ptr<Meeting>& World::meeting_of(const Issued& issued) {
  std::shared_ptr<Meeting>& meeting = meetings_[issued.key];
  if (meeting) return meeting;
  meeting = std::make_shared<Meeting>();
  meeting->key = issued.key;
  meeting->group = issued.group;
  for (const int rank : issued.participants) {
    meeting->participants.push_back(issued.group->members[static_cast<std::size_t>(rank)]);
  }
  meeting->calls.resize(issued.participants.size());
  meeting->dropped.resize(issued.participants.size());
  return meeting;
}

std::shared_ptr<Meeting> World::arrive(const Issued& issued) {
  std::shared_ptr<Meeting> meeting = meeting_of(issued);
  const int rank = world_rank(issued);
  ranks_[static_cast<std::size_t>(rank)].last_reached = issued.call;
  meeting->calls[issued.slot] = issued.call;
  ++meeting->num_arrived;
  const auto present = std::find_if(meeting->calls.begin(), meeting->calls.end(),
                                    [&](const auto& call) { return call && call != issued.call; });
  if (present != meeting->calls.end() && issued.key.kind != MeetingKind::kPair &&
      !same_collective(**present, *issued.call)) {
    const auto other = static_cast<std::size_t>(present - meeting->calls.begin());
    fail_all(ErrorKind::kCommunication, -1,
             "the ranks' calls do not match: " +
                 two_calls(*meeting, std::min(other, issued.slot), std::max(other, issued.slot)));
  }
  if (meeting->num_arrived == meeting->calls.size()) complete(*meeting);
  return meeting;
}

void World::complete(Meeting& meeting) {
  if (const Verdict verdict = counts_that_disagree(meeting.calls, meeting.participants); !verdict) {
    fail_all(ErrorKind::kCommunication, -1, "the ranks' calls do not match: " + verdict.reason);
  }
  meeting.pieces = cut_into_pieces(meeting.calls);
  if ((link_model_.bandwidth_gbps > 0 || link_model_.latency_us > 0) && is_paced(*meeting.calls[0])) {
    std::vector<Link*> links;
    for (const int rank : meeting.participants) links.push_back(&links_[static_cast<std::size_t>(rank)]);
    meeting.completions = book(link_model_, links, steady_clock::now(), meeting.calls);
    for (std::size_t slot = 0; slot < meeting.participants.size(); ++slot) {
      TimePoint& busy_until = ranks_[static_cast<std::size_t>(meeting.participants[slot])].busy_until;
      busy_until = std::max(busy_until, meeting.completions[slot]);
    }
  }
  if (meeting.key.kind == MeetingKind::kSubgroup) {
    std::vector<int> members;
    for (const std::int64_t rank : meeting.calls[0]->send_counts) {
      members.push_back(meeting.group->members[static_cast<std::size_t>(rank)]);
    }
    meeting.new_group = std::make_shared<Group>(next_group_id_++, std::move(members));
  }
  meeting.ready = true;
  // With nothing to move the others need not look for work first.
  meeting.done = meeting.pieces.empty();
  meeting.changed.notify_all();
}

void World::do_share(Lock& lock, Meeting& meeting) {
  if (failure_ || meeting.next_piece.load(std::memory_order_relaxed) >= meeting.pieces.size()) return;
  ++meeting.num_working;
  lock.unlock();
  // The mutex orders the pieces' data; the counter only hands each of them out once.
  for (std::size_t index = meeting.next_piece.fetch_add(1, std::memory_order_relaxed);
       index < meeting.pieces.size(); index = meeting.next_piece.fetch_add(1, std::memory_order_relaxed)) {
    carry_out(meeting.pieces[index], meeting.calls);
  }
  lock.lock();
  if (--meeting.num_working == 0) {
    meeting.done = true;
    meeting.changed.notify_all();
  }
}

void World::wait_until_done(Lock& lock, Meeting& meeting) {
  // Whoever works only moves memory and so comes to an end: this wait needs no time-out, and a failure must
  // not cut it short.
  meeting.changed.wait(lock, [&] { return meeting.done || (failure_ && meeting.num_working == 0); });
  if (!meeting.done) throw_if_failed();
}

void World::leave(Meeting& meeting) {
  if (++meeting.num_left == meeting.participants.size()) meetings_.erase(meeting.key);
}

void World::wait_for_link(Lock& lock, TimePoint until) {
  while (steady_clock::now() < until) {
    throw_if_failed();
    link_wait_.wait_until(lock, until);
  }
}

// Waiting for others.

void World::wait_for_all(Lock& lock, Meeting& meeting, const Issued& issued,
                         std::chrono::milliseconds timeout) {
  const TimePoint arrival = steady_clock::now();
  std::vector<const Meeting*>& waiting_in = ranks_[static_cast<std::size_t>(world_rank(issued))].waiting_in;
  waiting_in.push_back(&meeting);
  struct Forget {
    std::vector<const Meeting*>& list;
    const Meeting* meeting;
    ~Forget() { list.erase(std::find(list.begin(), list.end(), meeting)); }
  } const forget{waiting_in, &meeting};
  while (!meeting.ready) {
    throw_if_failed();
    check_nobody_is_gone(meeting, issued);
    // A rank that a paced link holds up is not late.
    const TimePoint deadline = std::max(arrival, latest_busy(meeting)) + timeout;
    if (steady_clock::now() >= deadline) {
      std::vector<int> named{world_rank(issued)};
      fail_all(ErrorKind::kTimeout, -1,
               fmt::format("rank {}: time-out after {:.3g} s in {}: {}", world_rank(issued),
                           std::chrono::duration<double>(steady_clock::now() - arrival).count(),
                           describe(*issued.call), who_is_missing(meeting, named)));
    }
    meeting.changed.wait_until(lock, deadline);
  }
}

bool World::can_still_come(const Meeting& meeting, std::size_t slot) const {
  if (meeting.dropped[slot]) return false;
  if (!ranks_[static_cast<std::size_t>(meeting.participants[slot])].finished) return true;
  const Group& group = *meeting.group;
  const auto issued = [&](const auto& counters, const auto& key) {
    const auto found = counters.find(key);
    return found != counters.end() && found->second > meeting.key.number;
  };
  switch (meeting.key.kind) {
    case MeetingKind::kCollective:
      return group.collectives[slot] > meeting.key.number;
    case MeetingKind::kPair:
      return issued(slot == 0 ? group.sends : group.receives,
                    std::pair(meeting.key.ranks[0], meeting.key.ranks[1]));
    case MeetingKind::kSubgroup:
      return issued(group.subgroups, std::pair(meeting.key.ranks[slot], meeting.key.ranks));
  }
  return true;
}

TimePoint World::latest_busy(const Meeting& meeting) const {
  TimePoint latest{};
  for (std::size_t slot = 0; slot < meeting.calls.size(); ++slot) {
    if (meeting.calls[slot]) continue;
    latest = std::max(latest, ranks_[static_cast<std::size_t>(meeting.participants[slot])].busy_until);
  }
  return latest;
}

void World::check_nobody_is_gone(const Meeting& meeting, const Issued& issued) {
  for (std::size_t slot = 0; slot < meeting.calls.size(); ++slot) {
    if (meeting.calls[slot] || can_still_come(meeting, slot)) continue;
    std::vector<int> named{world_rank(issued)};
    fail_all(ErrorKind::kCommunication, meeting.participants[slot],
             fmt::format("rank {}: cannot complete {}: {}", world_rank(issued), describe(*issued.call),
                         why_missing(meeting, slot, named)));
  }
}

std::string World::who_is_missing(const Meeting& meeting, std::vector<int>& named) const {
  std::string text;
  for (std::size_t slot = 0; slot < meeting.calls.size(); ++slot) {
    if (meeting.calls[slot]) continue;
    if (!text.empty()) text += "; ";
    text += why_missing(meeting, slot, named);
  }
  return text;
}

std::string World::why_missing(const Meeting& meeting, std::size_t slot, std::vector<int>& named) const {
  const int rank = meeting.participants[slot];
  std::string text = fmt::format("rank {} did not arrive", rank);
  if (meeting.dropped[slot])
    text += ": its stream dropped the call, because it met an error or was destroyed";
  if (std::find(named.begin(), named.end(), rank) != named.end()) return text;
  named.push_back(rank);
  return text + state_of(rank, named);
}

std::string World::state_of(int rank, std::vector<int>& named) const {
  const RankState& state = ranks_[static_cast<std::size_t>(rank)];
  std::string text = state.finished ? "; it has finished; " : "; ";
  if (!state.last_issued) return text + "it has made no call";
  text += "its last call was " + describe(*state.last_issued);
  if (state.last_issued != state.last_reached) {
    text += ", which its stream has not reached";
    if (state.last_reached) text += " (the last that it reached: " + describe(*state.last_reached) + ")";
  }
  for (const Meeting* meeting : state.waiting_in) {
    const std::string missing = who_is_missing(*meeting, named);
    if (missing.empty()) continue;
    const auto slot = std::find(meeting->participants.begin(), meeting->participants.end(), rank);
    const auto& call = meeting->calls[static_cast<std::size_t>(slot - meeting->participants.begin())];
    text += fmt::format("; it waits in {}, where {}", call ? describe(*call) : "a call", missing);
  }
  return text;
}

// Failing.

void World::throw_if_failed() const {
  if (failure_) throw Error(failure_->kind, failure_->message);
}

void World::fail_all(ErrorKind kind, int culprit, std::string message) {
  record({kind, std::move(message), culprit});
  throw Error(failure_->kind, failure_->message);
}

void World::record(Failure failure) {
  if (failure_) return;
  failure_ = std::move(failure);
  wake_all();
  if (!watchdog_file().empty()) core::write_watchdog_report("", failure_->message, report());
}

// JSON for the watchdog report: where each rank is.
std::string World::report() const {
  using nlohmann::json;
  json ranks = json::array();
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankState& state = ranks_[rank];
    json pending = json::array();
    for (const Meeting* meeting : state.waiting_in) {
      json missing = json::array();
      const Call* own = nullptr;
      for (std::size_t slot = 0; slot < meeting->calls.size(); ++slot) {
        if (!meeting->calls[slot]) missing.push_back(meeting->participants[slot]);
        if (meeting->participants[slot] == static_cast<int>(rank)) own = meeting->calls[slot].get();
      }
      if (own == nullptr) continue;
      pending.push_back({{"call", describe(*own)},
                         {"operation", own->operation},
                         {"group", own->wave_group},
                         {"transfer", own->transfer},
                         {"missing_ranks", std::move(missing)}});
    }
    ranks.push_back({{"rank", rank},
                     {"finished", state.finished},
                     {"last_call", state.last_issued ? describe(*state.last_issued) : ""},
                     {"last_call_reached", state.last_reached ? describe(*state.last_reached) : ""},
                     {"pending", std::move(pending)}});
  }
  const json report = {{"kind", "in-process"}, {"world_size", ranks_.size()}, {"ranks", std::move(ranks)}};
  return report.dump(-1, ' ', false, json::error_handler_t::replace);
}

void World::wake_all() {
  for (const auto& [key, meeting] : meetings_) meeting->changed.notify_all();
  link_wait_.notify_all();
  windows_changed_.notify_all();
}

void World::drop(const Issued& issued) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    const std::shared_ptr<Meeting> meeting = meeting_of(issued);
    meeting->dropped[issued.slot] = true;
    meeting->changed.notify_all();
    const auto num_dropped = std::count(meeting->dropped.begin(), meeting->dropped.end(), true);
    if (static_cast<std::size_t>(num_dropped) == meeting->participants.size()) meetings_.erase(issued.key);
  } catch (...) {
    // Out of memory: the others' time-out still ends their wait.
  }
}

void World::abort(int world_rank, const std::string& reason) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    record({ErrorKind::kCommunication, fmt::format("rank {} aborted: {}", world_rank, reason), world_rank});
  } catch (...) {
    // Out of memory for the text: the others' time-out still ends their wait.
  }
}

void World::finish(int world_rank) {
  const std::lock_guard lock(mutex_);
  ranks_[static_cast<std::size_t>(world_rank)].finished = true;
  wake_all();
}

std::optional<World::Failure> World::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace flashoverlap::comm

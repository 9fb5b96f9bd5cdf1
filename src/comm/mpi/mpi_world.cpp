#include "comm/mpi/mpi_world.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/mpi/mpi_error.h"
#include "comm/mpi/service.h"
#include "core/fail.h"
#include "core/host_name.h"
#include "core/watchdog.h"

namespace flashoverlap::comm::mpi {
namespace {

using namespace std::chrono_literals;

// How long a rank that is asked has to answer. Its service thread looks every 50 ms, but its machine may be
// busy.
constexpr auto kAnswerWithin = 2s;
// How long a message that a rank sent before it finished may take.
constexpr auto kLastMessagesWithin = 1s;
constexpr auto kUrgentFor = 5s;

std::string process_and_host() {
  return fmt::format("process {} on host {}", getpid(), core::host_name());
}

}  // namespace

MpiWorld::MpiWorld(MPI_Comm control) : control_comm_(control), control_(control) {
  check(MPI_Comm_rank(control, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(control, &size_), "MPI_Comm_size");
  others_.resize(static_cast<std::size_t>(size_));
  tell_all({.kind = ControlKind::kHello, .text = process_and_host()});
}

void MpiWorld::free_control() {
  MPI_Comm_free(&control_comm_);
}

// Failing.

void MpiWorld::throw_if_failed() const {
  if (!failed()) return;
  const std::lock_guard lock(mutex_);
  throw Error(failure_->kind, failure_->message);
}

void MpiWorld::fail_all(ErrorKind kind, const std::string& message) {
  if (record(kind, message)) {
    tell_all({.kind = ControlKind::kFailure, .error_kind = kind, .text = message});
  }
  throw_if_failed();
  core::fail(ErrorKind::kInternal, "{}", message);
}

void MpiWorld::abort(const std::string& reason) noexcept {
  try {
    const std::string message = fmt::format("rank {} aborted: {}", rank_, reason);
    if (!record(ErrorKind::kCommunication, message)) return;
    tell_all({.kind = ControlKind::kFailure, .error_kind = ErrorKind::kCommunication, .text = message});
  } catch (...) {
    // Out of memory for the text: the others' time-out still ends their wait.
  }
}

// True when it is the first failure.
bool MpiWorld::record(ErrorKind kind, const std::string& message) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return false;
    failure_ = {kind, message};
    urgent_until_ = Clock::now() + kUrgentFor;
    has_failed_.store(true, std::memory_order_release);
    answered_.notify_all();
  }
  core::write_watchdog_report(size_ > 1 ? fmt::format(".rank{}", rank_) : "", message);
  return true;
}

void MpiWorld::tell_all(const ControlMessage& message) noexcept {
  for (int other = 0; other < size_; ++other) {
    if (other == rank_) continue;
    try {
      control_.send(other, message);
    } catch (...) {
      // Its own time-out will end its wait.
    }
  }
}

void MpiWorld::finish() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(has_finished_, true)) return;
  }
  tell_all({.kind = ControlKind::kFinished, .number = Service::instance().has_lost_rank() ? 1 : 0});
}

// Bookkeeping.

void MpiWorld::note_issued(std::shared_ptr<const Call> call) {
  const std::lock_guard lock(mutex_);
  if (failure_) throw Error(failure_->kind, failure_->message);
  last_issued_ = std::move(call);
  ++num_issued_;
}

void MpiWorld::enter(const std::shared_ptr<Pending>& pending) {
  const std::lock_guard lock(mutex_);
  last_reached_ = pending->call;
  pending_.push_back(pending);
}

void MpiWorld::leave(const std::shared_ptr<Pending>& pending) {
  const std::lock_guard lock(mutex_);
  pending_.erase(std::find(pending_.begin(), pending_.end(), pending));
  ++num_completed_;
}

void MpiWorld::note_seen(int rank, const Call& call) {
  std::string text = describe(call);
  const std::lock_guard lock(mutex_);
  others_[static_cast<std::size_t>(rank)].last_seen = std::move(text);
}

bool MpiWorld::finished_before(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto& finished = others_[static_cast<std::size_t>(rank)].finished;
  return finished && Clock::now() - *finished > kLastMessagesWithin;
}

// Questions.

std::string MpiWorld::own_state() const {
  const std::lock_guard lock(mutex_);
  std::string text = has_finished_ ? "it has finished; " : "";
  if (!last_issued_) return text + "it has made no call";
  text += "its last call was " + describe(*last_issued_);
  if (last_issued_ != last_reached_) {
    text += ", which its stream has not reached";
    if (last_reached_) text += " (the last that it reached: " + describe(*last_reached_) + ")";
  }
  for (const auto& pending : pending_) {
    std::string missing;
    for (const Pending::Peer& peer : pending->peers) {
      if (peer.has_arrived || pending->call->kind == CallKind::kSend) continue;
      missing += fmt::format("{}rank {}", missing.empty() ? "" : ", ", peer.world_rank);
    }
    text += fmt::format("; it waits in {}", describe(*pending->call));
    if (!missing.empty()) text += fmt::format(", where {} did not arrive", missing);
  }
  return text;
}

std::int64_t MpiWorld::ask(const std::vector<int>& ranks) {
  std::int64_t question = 0;
  {
    const std::lock_guard lock(mutex_);
    question = next_question_++;
    urgent_until_ = Clock::now() + kUrgentFor;
  }
  for (const int rank : ranks) {
    if (rank != rank_) control_.send(rank, {.kind = ControlKind::kQuestion, .number = question});
  }
  Service::instance().wake();
  std::unique_lock lock(mutex_);
  const auto has_answered = [&](int rank) { return rank == rank_ || answers_.contains({question, rank}); };
  answered_.wait_until(lock, Clock::now() + kAnswerWithin,
                       [&] { return failure_ || std::all_of(ranks.begin(), ranks.end(), has_answered); });
  return question;
}

bool MpiWorld::all_answer() {
  const std::vector<int> ranks = others_at_work();
  const std::int64_t question = ask(ranks);
  const std::lock_guard lock(mutex_);
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    return answers_.contains({question, rank});
  });
}

std::vector<std::string> MpiWorld::whereabouts(const std::vector<int>& ranks) {
  const std::int64_t question = ask(ranks);
  const std::lock_guard lock(mutex_);
  std::vector<std::string> texts;
  for (const int rank : ranks) {
    if (const auto answer = answers_.find({question, rank}); answer != answers_.end()) {
      texts.push_back(answer->second);
      continue;
    }
    const Other& other = others_[static_cast<std::size_t>(rank)];
    std::string text = fmt::format("{} does not answer: it is dead, stopped or cut off",
                                   other.process.empty() ? "it" : other.process);
    text += other.last_seen.empty() ? "; no call of it was seen here"
                                    : "; its last call that was seen here: " + other.last_seen;
    texts.push_back(std::move(text));
  }
  return texts;
}

// The service thread.

bool MpiWorld::serve() {
  bool anything = false;
  while (auto received = control_.receive()) {
    anything = true;
    take(*received);
  }
  control_.all_sent();
  return anything;
}

void MpiWorld::take(const ControlChannel::Received& received) {
  const auto& [rank, message] = received;
  switch (message.kind) {
    case ControlKind::kFailure:
      record(message.error_kind, message.text);
      return;
    case ControlKind::kQuestion:
      return control_.send(rank,
                           {.kind = ControlKind::kAnswer, .number = message.number, .text = own_state()});
    case ControlKind::kFinished:
      // MPI_Finalize waits for all ranks, so all must go there or none.
      if (message.number != 0) Service::instance().note_lost_rank();
      break;
    default:
      break;
  }
  const std::lock_guard lock(mutex_);
  Other& other = others_[static_cast<std::size_t>(rank)];
  if (message.kind == ControlKind::kHello) other.process = message.text;
  if (message.kind == ControlKind::kFinished) other.finished = Clock::now();
  if (message.kind == ControlKind::kAnswer) answers_[{message.number, rank}] = message.text;
  answered_.notify_all();
}

bool MpiWorld::is_urgent() const {
  const std::lock_guard lock(mutex_);
  return Clock::now() < urgent_until_;
}

bool MpiWorld::is_over() {
  {
    const std::lock_guard lock(mutex_);
    if (!has_finished_) return false;
  }
  return others_at_work().empty() && control_.all_sent();
}

bool MpiWorld::has_calls_in_flight() const {
  const std::lock_guard lock(mutex_);
  return !pending_.empty();
}

std::vector<int> MpiWorld::others_at_work() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    const Other& other = others_[static_cast<std::size_t>(rank)];
    if (rank != rank_ && !other.finished) ranks.push_back(rank);
  }
  return ranks;
}

std::string MpiWorld::report() const {
  using nlohmann::json;
  const std::lock_guard lock(mutex_);
  json pending = json::array();
  for (const auto& call : pending_) {
    json peers = json::array();
    for (const Pending::Peer& peer : call->peers) {
      peers.push_back({{"rank", peer.world_rank},
                       {"arrived", peer.has_arrived.load()},
                       {"segments_received", peer.segments_received.load()},
                       {"segments_to_receive", peer.segments_to_receive},
                       {"segments_sent", peer.segments_sent.load()},
                       {"segments_to_send", peer.segments_to_send}});
    }
    pending.push_back({{"call", describe(*call->call)},
                       {"operation", call->call->operation},
                       {"group", call->call->wave_group},
                       {"transfer", call->call->transfer},
                       {"seconds", std::chrono::duration<double>(Clock::now() - call->since).count()},
                       {"peers", std::move(peers)}});
  }
  json others = json::array();
  for (int rank = 0; rank < size_; ++rank) {
    const Other& other = others_[static_cast<std::size_t>(rank)];
    if (rank == rank_) continue;
    others.push_back({{"rank", rank},
                      {"process", other.process},
                      {"finished", other.finished.has_value()},
                      {"last_call_seen", other.last_seen}});
  }
  const json report = {{"kind", "mpi"},
                       {"rank", rank_},
                       {"world_size", size_},
                       {"calls_issued", num_issued_},
                       {"calls_completed", num_completed_},
                       {"last_call", last_issued_ ? describe(*last_issued_) : ""},
                       {"last_call_reached", last_reached_ ? describe(*last_reached_) : ""},
                       {"pending", std::move(pending)},
                       {"other_ranks", std::move(others)}};
  return report.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace flashoverlap::comm::mpi

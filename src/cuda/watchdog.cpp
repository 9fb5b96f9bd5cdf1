#include "watchdog.h"

#include <utility>

#include "check.h"
#include "core/fail.h"

namespace flashoverlap::cuda {
namespace {

constexpr std::chrono::milliseconds kPeriod{1};
constexpr std::chrono::milliseconds kIdlePeriod{10};

}  // namespace

void FailureBoard::set(Failure failure) {
  const std::scoped_lock lock(mutex_);
  if (is_set_.load(std::memory_order_relaxed)) return;
  failure_ = std::move(failure);
  is_set_.store(true, std::memory_order_release);
}

std::optional<Failure> FailureBoard::get() const {
  if (!is_set()) return std::nullopt;
  const std::scoped_lock lock(mutex_);
  return failure_;
}

Watchdog::Watchdog(int device, std::chrono::milliseconds timeout, std::shared_ptr<FailureBoard> board,
                   PollError poll_error, OnFailure on_failure)
    : device_(device),
      timeout_ms_(timeout.count()),
      board_(std::move(board)),
      poll_error_(std::move(poll_error)),
      on_failure_(std::move(on_failure)),
      thread_([this] { watch(); }) {}

Watchdog::~Watchdog() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Watchdog::begin(cudaStream_t stream, std::string what) {
  if (is_capturing(stream)) return;
  const std::scoped_lock lock(mutex_);
  const auto take = [this] {
    if (spare_events_.empty()) return Event();
    Event event = std::move(spare_events_.back());
    spare_events_.pop_back();
    return event;
  };
  Call call{take(), take(), std::move(what), std::nullopt, std::chrono::steady_clock::now()};
  call.begin.record(stream);
  calls_.push_back(std::move(call));
}

void Watchdog::end(cudaStream_t stream) {
  if (is_capturing(stream)) return;
  const std::scoped_lock lock(mutex_);
  if (calls_.empty()) return;  // given up already
  calls_.back().end.record(stream);
  calls_.back().issuing = false;
}

std::optional<Failure> Watchdog::look_at(Call& call, std::chrono::steady_clock::time_point now) const {
  if (!call.started) {
    // A call on which the host itself is stuck counts from its issue, any other from when the stream had come
    // to it.
    if (call.issuing) {
      if (now - call.issued <= timeout()) return std::nullopt;
    } else {
      if (call.begin.has_come()) call.started = now;
      return std::nullopt;
    }
  } else if (now - *call.started <= timeout()) {
    return std::nullopt;
  }
  return Failure{ErrorKind::kTimeout,
                 fmt::format("{} was not done {} ms after it could start: a rank did not call it, or failed",
                             call.what, timeout().count())};
}

std::optional<Failure> Watchdog::look() {
  if (auto failure = board_->get()) return failure;
  if (auto failure = poll_error_()) return failure;
  const auto now = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < calls_.size();) {
    Call& call = calls_[i];
    if (!call.issuing && call.end.has_come()) {
      spare_events_.push_back(std::move(call.begin));
      spare_events_.push_back(std::move(call.end));
      calls_.erase(calls_.begin() + static_cast<std::ptrdiff_t>(i));
      continue;
    }
    if (auto failure = look_at(call, now)) return failure;
    // In one stream calls end in order, so those behind one that has not ended need no look; a few streams
    // cost a few looks.
    ++i;
    if (i >= 4) break;
  }
  return std::nullopt;
}

void Watchdog::watch() {
  (void)cudaSetDevice(device_);
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, calls_.empty() ? kIdlePeriod : kPeriod);
    if (stop_) return;
    std::optional<Failure> failure;
    try {
      failure = look();
    } catch (const Error& error) {
      failure = Failure{error.kind(), error.what()};
    }
    if (!failure) continue;
    calls_.clear();
    lock.unlock();
    on_failure_(*failure);
    return;
  }
}

}  // namespace flashoverlap::cuda

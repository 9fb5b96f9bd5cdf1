// Sees to it that a collective which cannot end does not hang its caller.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "flashoverlap/error.h"

namespace flashoverlap::cuda {

struct Failure {
  ErrorKind kind = ErrorKind::kCommunication;
  std::string reason;
};

/// Where ranks of one process tell each other that one has failed; the first reason stays.
class FailureBoard {
 public:
  void set(Failure failure);
  [[nodiscard]] bool is_set() const { return is_set_.load(std::memory_order_acquire); }
  [[nodiscard]] std::optional<Failure> get() const;

 private:
  std::atomic<bool> is_set_{false};
  mutable std::mutex mutex_;
  Failure failure_;
};

/// Watches calls that were put into streams. A thread looks every millisecond whether a call that could start
/// is done; when it is not within the time-out, or `poll_error` gives a reason, or the board has one,
/// `on_failure` is called, once.
class Watchdog {
 public:
  using PollError = std::function<std::optional<Failure>()>;
  using OnFailure = std::function<void(const Failure&)>;

  Watchdog(int device, std::chrono::milliseconds timeout, std::shared_ptr<FailureBoard> board,
           PollError poll_error, OnFailure on_failure);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Around the putting of one call into `stream`. `what` says in an error message what it was. Does nothing
  /// where the stream is being captured: a graph's replays are not watched.
  void begin(cudaStream_t stream, std::string what);
  void end(cudaStream_t stream);

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_ = timeout.count(); }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_ms_); }

 private:
  struct Call {
    Event begin;
    Event end;
    std::string what;
    std::optional<std::chrono::steady_clock::time_point> started;
    std::chrono::steady_clock::time_point issued;
    bool issuing = true;  // the host is still inside the call
  };

  void watch();
  std::optional<Failure> look();
  std::optional<Failure> look_at(Call& call, std::chrono::steady_clock::time_point now) const;

  const int device_;
  std::atomic<std::int64_t> timeout_ms_;
  const std::shared_ptr<FailureBoard> board_;
  const PollError poll_error_;
  const OnFailure on_failure_;

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::deque<Call> calls_;
  std::vector<Event> spare_events_;
  std::thread thread_;
};

}  // namespace flashoverlap::cuda

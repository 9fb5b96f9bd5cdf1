#pragma once

#include <chrono>

namespace flashoverlap::comm::mpi {

/// What a waiting thread does; see Backoff.
struct BackoffPolicy {
  std::chrono::microseconds yield_for{30};
  std::chrono::microseconds first_sleep{20};
  std::chrono::microseconds longest_sleep{1000};
};

/// How a thread that waits for messages polls: it yields for a short while, because most answers are near,
/// and then sleeps, longer each time, up to a millisecond, so that a long wait leaves the core to others.
class Backoff {
 public:
  Backoff();
  /// Something came: more is likely to come soon.
  void reset();
  void wait();

  /// Of all waits of this process. Changed by bench/mpi/backoff_bench.cpp only, while nobody waits.
  static inline BackoffPolicy policy;

 private:
  using Clock = std::chrono::steady_clock;

  Clock::time_point yield_until_;
  std::chrono::microseconds sleep_{};
};

}  // namespace flashoverlap::comm::mpi

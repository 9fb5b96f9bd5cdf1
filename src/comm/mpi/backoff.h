#pragma once

#include <chrono>

namespace flashoverlap::comm::mpi {

/// How a thread that waits for messages polls: it yields for a short while, because most answers are near,
/// and then sleeps, longer each time, up to a millisecond, so that a long wait leaves the core to others. The
/// constants are chosen, not measured.
class Backoff {
 public:
  Backoff();
  /// Something came: more is likely to come soon.
  void reset();
  void wait();

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kYieldFor{30};
  static constexpr std::chrono::microseconds kFirstSleep{20};
  static constexpr std::chrono::microseconds kLongestSleep{1000};

  Clock::time_point yield_until_;
  std::chrono::microseconds sleep_{kFirstSleep};
};

}  // namespace flashoverlap::comm::mpi

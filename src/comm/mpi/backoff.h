#pragma once

#include <chrono>

namespace flashoverlap::comm::mpi {

/// How a thread that waits for messages polls: it yields for a short while, because most answers are near,
/// and then sleeps, longer each time. The constants are chosen, not measured: yields cover a hand-over within
/// a host, sleeps stay below a network's latency at first and cost a core less than a tenth of a percent at
/// the end.
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

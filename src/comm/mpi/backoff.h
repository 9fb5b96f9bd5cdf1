#pragma once

#include <chrono>

namespace flashoverlap::comm::mpi {

// clang-format off
/// What a waiting thread does: it looks again at once for `poll_for`, because most answers are near; then it
/// sleeps, each time a quarter longer.
///
/// Measured by bench/mpi/backoff_bench.cpp (2026-11-29; OpenMPI 4.1.4, two ranks over shared memory on 2 cores
/// of an AMD EPYC, with priority over compilers that ran beside it). *ping*: half a round trip of one element;
/// *reduce*: all-reduce of 4 MiB; *shared*: the same while a thread computes on each core, as an overlapped
/// GEMM does; *late*: how long after 20 ms of waiting a message is seen; all in us. *busy*: cores in use.
///
///   policy                      ping  reduce  shared   late   busy
///   yields for 30 us              20    3509   33972    548  0.021  gives its core away for a time slice
///   never polls                   33    2268   14878    842  0.021
///   polls for 10 us               33    2250    6966    779  0.021
///   polls for 30 us               18    1175    4823    961  0.022  chosen
///   polls for 100 us              17    1062    2242    904  0.024  the more ranks than cores, the dearer
///   first sleep 5 us              17    1107    4589    510  0.021  like 20 us, within the scatter
///   first sleep 100 us            18    1568    8591    675  0.022
///   sleeps of at most 100 us      19    2462    5255    227  0.104  a tenth of a core
///   sleeps of at most 300 us      21    1234    4235    305  0.056
///   sleeps of at most 10 ms       18    1128    7043   2669  0.006
// clang-format on
struct BackoffPolicy {
  std::chrono::microseconds poll_for{30};
  bool yields = false;  ///< Between two looks while it polls.
  std::chrono::microseconds first_sleep{20};
  std::chrono::microseconds longest_sleep{1000};
};

/// How a thread that waits for messages polls. A long wait leaves the core to others.
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

  Clock::time_point poll_until_;
  std::chrono::microseconds sleep_{};
};

}  // namespace flashoverlap::comm::mpi

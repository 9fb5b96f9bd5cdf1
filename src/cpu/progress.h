#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

#include "flashoverlap/plan.h"

namespace flashoverlap::cpu {

/// Thrown by waits of a run that has failed elsewhere on this rank, to unwind. Never leaves the executor.
struct RunStopped {};

/// What compute threads and streams of one run tell each other: the counting table, arrived slices, failure.
/// One object per run, so that nothing of a run can reach the next.
class Progress {
 public:
  /// `num_passes`: of the plan, as its preparation has counted them.
  /// `num_row_runs`: of RowRuns.
  Progress(const OverlapPlan& plan, std::int64_t num_passes, std::int64_t num_row_runs);

  /// By a compute thread, after it has written all of a tile of the group. The last tile wakes who waits for
  /// the group.
  void count_tile(std::int64_t group);
  /// By a stream: returns once the group is complete and its writes are visible. Throws RunStopped after a
  /// failure.
  void wait_for_group(std::int64_t group);

  /// By a compute thread, after it has written a tile's partial sums at the end of a pass that is not the
  /// last.
  void count_pass(std::int64_t tile);
  /// By the compute thread that has the tile in the next pass: returns once `passes` passes of the tile are
  /// done and their writes visible. Throws RunStopped after a failure.
  void wait_for_pass(std::int64_t tile, std::int64_t passes);

  /// By a stream, once the slice's data is in place.
  void mark_slice(std::int64_t slice);
  [[nodiscard]] bool has_slice(std::int64_t slice) const {
    return arrived_[static_cast<std::size_t>(slice)].load(std::memory_order_acquire);
  }
  /// By a compute thread or stream. Throws RunStopped after a failure.
  void wait_for_slice(std::int64_t slice);

  /// Before the streams are given anything: how many there are.
  void start_streams(std::int64_t count) { running_streams_.store(count, std::memory_order_relaxed); }
  /// By a stream that has done all it was given.
  void end_stream() { running_streams_.fetch_sub(1, std::memory_order_relaxed); }
  /// Whether any stream has not. A hint: it orders no memory accesses.
  [[nodiscard]] bool has_running_streams() const {
    return running_streams_.load(std::memory_order_relaxed) > 0;
  }

  /// By a compute thread, once the rows of a run of RowRuns are in A.
  void mark_rows(std::int64_t run);
  [[nodiscard]] bool has_rows(std::int64_t run) const {
    return made_[static_cast<std::size_t>(run)].load(std::memory_order_acquire);
  }
  /// By a compute thread. Throws RunStopped after a failure.
  void wait_for_rows(std::int64_t run);

  /// Keeps the error as the run's, where there is none yet, without ending the run.
  void note(std::exception_ptr error) noexcept;
  /// Ends the run on this rank: waiters unwind, no further tile starts. The first error stays; null: the
  /// error will come out of a stream.
  void fail(std::exception_ptr error) noexcept;
  /// Tiles counted so far and in all, of each group: for reports.
  struct Count {
    std::int64_t done;
    std::int64_t expected;
  };
  [[nodiscard]] std::vector<Count> counts() const;
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::exception_ptr error() const;

 private:
  // Own cache lines: threads finish tiles of two groups at the same time at every boundary of groups.
  struct alignas(64) Counter {
    // Compute threads add 1 (release) per tile; the group's stream waits for `expected` (acquire). Never
    // reset.
    std::atomic<std::int64_t> done{0};
    std::int64_t expected = 0;
  };

  template <typename Ready>
  void wait(const Ready& ready);

  std::vector<Counter> counters_;
  std::vector<std::atomic<bool>> arrived_;         // streams set (release), compute threads read (acquire)
  std::vector<std::atomic<bool>> made_;            // compute threads set (release) and read (acquire)
  std::vector<std::atomic<std::int64_t>> passes_;  // by tile; empty where there is one pass only
  // Threads in wait_for_pass, which are few: others need not take the lock for them. All accesses to it and
  // to passes_ are sequentially consistent, so that whoever counts sees the waiter or is seen by it.
  std::atomic<int> waiting_for_pass_{0};
  std::atomic<std::int64_t> running_streams_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace flashoverlap::cpu

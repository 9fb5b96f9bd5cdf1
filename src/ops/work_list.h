#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "cpu/thread_pool.h"
#include "flashoverlap/executor.h"

namespace flashoverlap::ops {

/// Memory for a step, kept between steps.
struct WorkScratch {
  std::vector<float> left;
  std::vector<float> right;
};

/// Work that nobody waits for yet, in steps short enough to be done while a tile waits
/// (Operands::other_work). A sequence's steps follow one another, so what they add up has the same bits
/// whoever does them; different sequences are done in any order, and at the same time.
class WorkList {
 public:
  struct Sequence {
    std::int64_t num_steps = 0;
    std::function<void(std::int64_t step, WorkScratch& scratch)> run;
    /// Slices of the plan that the step reads; no function: none.
    std::function<std::span<const std::int64_t>(std::int64_t step)> slices = {};
  };

  /// Not while steps are being done.
  void add(Sequence sequence);

  /// Does one step of which all slices have arrived; null: all have. False: there is none that nobody is at.
  /// An exception of a step ends the list: nothing more is done. Thread-safe.
  bool do_step(const SliceArrived& has_arrived);

  /// Does what is left, on all threads of the pool, with all slices there.
  void finish(cpu::ThreadPool& pool);

  /// Time of all steps so far, added up over threads, in microseconds.
  [[nodiscard]] double busy_us() const { return busy_us_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    Sequence sequence;
    std::int64_t next_step = 0;
    bool taken = false;
  };

  /// Takes the first entry that can go on; null: none.
  Entry* take(const SliceArrived& has_arrived, WorkScratch& scratch);
  void give_back(Entry& entry, WorkScratch& scratch);
  void end_list();

  std::mutex mutex_;  // of all below but busy_us_
  std::vector<Entry> entries_;
  std::size_t first_open_ = 0;  // entries before it are done
  std::vector<WorkScratch> scratches_;
  std::atomic<double> busy_us_{0};
};

}  // namespace flashoverlap::ops

#include "cpu/progress.h"

#include <utility>

namespace flashoverlap::cpu {

Progress::Progress(const OverlapPlan& plan, std::int64_t num_passes, std::int64_t num_row_runs)
    : counters_(plan.groups.size()),
      arrived_(plan.slices.size()),
      made_(static_cast<std::size_t>(num_row_runs)),
      passes_(num_passes > 1 ? plan.schedule.size() : 0) {
  for (std::size_t group = 0; group < plan.groups.size(); ++group) {
    counters_[group].expected = plan.groups[group].num_tiles;
  }
}

template <typename Ready>
void Progress::wait(const Ready& ready) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failed() || ready(); });
  if (failed()) throw RunStopped{};
}

void Progress::count_tile(std::int64_t group) {
  Counter& counter = counters_[static_cast<std::size_t>(group)];
  // Acquire as well: whoever is last passes on, with the lock below, what all others have written.
  if (counter.done.fetch_add(1, std::memory_order_acq_rel) + 1 < counter.expected) return;
  // A waiter that saw the old count holds the lock until it sleeps, so it cannot miss this.
  { const std::scoped_lock lock(mutex_); }
  changed_.notify_all();
}

std::vector<Progress::Count> Progress::counts() const {
  std::vector<Count> counts;
  for (const Counter& counter : counters_) {
    counts.push_back({counter.done.load(std::memory_order_relaxed), counter.expected});
  }
  return counts;
}

void Progress::wait_for_group(std::int64_t group) {
  const Counter& counter = counters_[static_cast<std::size_t>(group)];
  wait([&] { return counter.done.load(std::memory_order_acquire) >= counter.expected; });
}

void Progress::count_pass(std::int64_t tile) {
  passes_[static_cast<std::size_t>(tile)].fetch_add(1);
  if (waiting_for_pass_.load() == 0) return;
  { const std::scoped_lock lock(mutex_); }
  changed_.notify_all();
}

void Progress::wait_for_pass(std::int64_t tile, std::int64_t passes) {
  const std::atomic<std::int64_t>& done = passes_[static_cast<std::size_t>(tile)];
  if (done.load() >= passes) return;
  struct Waiting {
    explicit Waiting(std::atomic<int>& count) : count_(count) { ++count_; }
    ~Waiting() { --count_; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    std::atomic<int>& count_;
  };
  const Waiting waiting(waiting_for_pass_);
  wait([&] { return done.load() >= passes; });
}

void Progress::mark_slice(std::int64_t slice) {
  arrived_[static_cast<std::size_t>(slice)].store(true, std::memory_order_release);
  { const std::scoped_lock lock(mutex_); }
  changed_.notify_all();
}

void Progress::wait_for_slice(std::int64_t slice) {
  if (has_slice(slice)) return;
  wait([&] { return has_slice(slice); });
}

void Progress::mark_rows(std::int64_t run) {
  made_[static_cast<std::size_t>(run)].store(true, std::memory_order_release);
  { const std::scoped_lock lock(mutex_); }
  changed_.notify_all();
}

void Progress::wait_for_rows(std::int64_t run) {
  wait([&] { return has_rows(run); });
}

void Progress::note(std::exception_ptr error) noexcept {
  const std::scoped_lock lock(mutex_);
  if (error_ == nullptr) error_ = std::move(error);
}

void Progress::fail(std::exception_ptr error) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (error_ == nullptr) error_ = std::move(error);
    failed_.store(true, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

std::exception_ptr Progress::error() const {
  const std::scoped_lock lock(mutex_);
  return error_;
}

}  // namespace flashoverlap::cpu

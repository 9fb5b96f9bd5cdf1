#include "ops/work_list.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "cpu/blas.h"

namespace flashoverlap::ops {

void WorkList::add(Sequence sequence) {
  if (sequence.num_steps > 0) entries_.push_back({.sequence = std::move(sequence)});
}

bool WorkList::do_step(const SliceArrived& has_arrived) {
  WorkScratch scratch;
  Entry* entry = take(has_arrived, scratch);
  if (entry == nullptr) return false;
  const auto begin = std::chrono::steady_clock::now();
  try {
    entry->sequence.run(entry->next_step, scratch);
  } catch (...) {
    end_list();
    throw;
  }
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  busy_us_.fetch_add(took.count(), std::memory_order_relaxed);
  give_back(*entry, scratch);
  return true;
}

WorkList::Entry* WorkList::take(const SliceArrived& has_arrived, WorkScratch& scratch) {
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = first_open_; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    const bool done = entry.next_step == entry.sequence.num_steps;
    if (done && i == first_open_) ++first_open_;
    if (done || entry.taken) continue;
    if (has_arrived != nullptr && entry.sequence.slices != nullptr &&
        !std::ranges::all_of(entry.sequence.slices(entry.next_step), has_arrived)) {
      continue;
    }
    entry.taken = true;
    if (!scratches_.empty()) {
      scratch = std::move(scratches_.back());
      scratches_.pop_back();
    }
    return &entry;
  }
  return nullptr;
}

void WorkList::give_back(Entry& entry, WorkScratch& scratch) {
  const std::scoped_lock lock(mutex_);
  ++entry.next_step;
  entry.taken = false;
  scratches_.push_back(std::move(scratch));
}

void WorkList::end_list() {
  const std::scoped_lock lock(mutex_);
  first_open_ = entries_.size();
}

void WorkList::finish(cpu::ThreadPool& pool) {
  if (entries_.empty()) return;
  const cpu::SingleThreadedBlas single_threaded;
  std::exception_ptr error;
  std::mutex mutex;
  pool.run([&](int) {
    try {
      while (do_step(nullptr)) {
      }
    } catch (...) {
      const std::scoped_lock lock(mutex);
      if (error == nullptr) error = std::current_exception();
    }
  });
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace flashoverlap::ops

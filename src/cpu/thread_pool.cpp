#include "cpu/thread_pool.h"

#include <pthread.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace flashoverlap::cpu {

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable started;
  std::condition_variable finished;
  const std::function<void(int)>* function = nullptr;
  std::uint64_t round = 0;  // a worker that has not seen this round yet has work to do
  int running = 0;
  bool stop = false;
  std::vector<std::thread> threads;

  void work(int thread) {
    std::uint64_t seen = 0;
    while (true) {
      const std::function<void(int)>* current = nullptr;
      {
        std::unique_lock lock(mutex);
        started.wait(lock, [&] { return stop || round != seen; });
        if (stop) return;
        seen = round;
        current = function;
      }
      (*current)(thread);
      const std::scoped_lock lock(mutex);
      if (--running == 0) finished.notify_one();
    }
  }

  void join() {
    {
      const std::scoped_lock lock(mutex);
      stop = true;
    }
    started.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int num_threads, const std::string& name) : state_(std::make_unique<State>()) {
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      state_->threads.emplace_back([state = state_.get(), thread] { state->work(thread); });
      const std::string label = (name + " " + std::to_string(thread)).substr(0, 15);  // the kernel's limit
      pthread_setname_np(state_->threads.back().native_handle(), label.c_str());
    }
  } catch (...) {  // no more threads to be had: give back those that were
    state_->join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  state_->join();
}

int ThreadPool::num_threads() const {
  return static_cast<int>(state_->threads.size()) + 1;
}

void ThreadPool::run(const std::function<void(int)>& function) {
  if (!state_->threads.empty()) {
    const std::scoped_lock lock(state_->mutex);
    state_->function = &function;
    state_->running = static_cast<int>(state_->threads.size());
    ++state_->round;
  }
  state_->started.notify_all();
  function(0);
  std::unique_lock lock(state_->mutex);
  state_->finished.wait(lock, [&] { return state_->running == 0; });
}

}  // namespace flashoverlap::cpu

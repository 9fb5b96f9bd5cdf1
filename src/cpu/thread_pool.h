#pragma once

#include <functional>
#include <memory>
#include <string>

namespace flashoverlap::cpu {

/// Threads that run one function at a time together with the thread that calls `run`.
class ThreadPool {
 public:
  /// `num_threads` counts the caller, so num_threads - 1 are started. `name` shows in debuggers.
  ThreadPool(int num_threads, const std::string& name);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const;

  /// Calls function(0) here and function(1), function(2), … on the other threads; returns when all have
  /// returned. `function` must not throw. Idle threads sleep.
  void run(const std::function<void(int thread)>& function);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace flashoverlap::cpu

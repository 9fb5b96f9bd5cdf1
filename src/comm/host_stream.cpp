#include "flashoverlap/host_stream.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "core/fail.h"

namespace flashoverlap {

struct HostStream::State {
  std::string name;
  std::function<void()> on_unwind;
  int exceptions_at_birth = 0;
  std::mutex mutex;
  std::condition_variable work;  // The thread waits here for a task or the end.
  std::condition_variable idle;  // `synchronize` waits here.
  std::deque<std::function<void()>> tasks;
  std::exception_ptr error;
  bool running = false;
  bool stopping = false;
  std::thread thread;

  void serve();
};

namespace {

std::exception_ptr run(const std::function<void()>& task) {
  // The error leaves as the only reference to it, so that the thread that rethrows it is also the one that
  // destroys it.
  std::exception_ptr error;
  try {
    task();
  } catch (...) {
    error = std::current_exception();
  }
  return error;
}

}  // namespace

void HostStream::State::serve() {
  std::unique_lock lock(mutex);
  while (true) {
    work.wait(lock, [&] { return stopping || !tasks.empty(); });
    if (stopping) return;
    std::function<void()> task = std::move(tasks.front());
    tasks.pop_front();
    running = true;
    lock.unlock();
    std::exception_ptr failure = run(task);
    task = nullptr;
    lock.lock();
    std::deque<std::function<void()>> dropped;
    if (failure) {
      error = std::move(failure);
      dropped.swap(tasks);
    }
    if (!dropped.empty()) {
      // Captured objects may do anything in their destructors, also use this stream.
      lock.unlock();
      dropped.clear();
      lock.lock();
    }
    running = false;
    if (tasks.empty()) idle.notify_all();
  }
}

HostStream::HostStream(std::string name, std::function<void()> on_unwind)
    : state_(std::make_unique<State>()) {
  state_->name = std::move(name);
  state_->on_unwind = std::move(on_unwind);
  state_->exceptions_at_birth = std::uncaught_exceptions();
  state_->thread = std::thread([state = state_.get()] { state->serve(); });
  pthread_setname_np(state_->thread.native_handle(), state_->name.substr(0, 15).c_str());
}

HostStream::~HostStream() {
  if (state_->on_unwind && std::uncaught_exceptions() > state_->exceptions_at_birth) state_->on_unwind();
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->work.notify_all();
  state_->thread.join();
}

void HostStream::enqueue(std::function<void()> task) {
  if (!task) core::fail(ErrorKind::kBadArgument, "stream '{}': the task is an empty function", state_->name);
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->error) return;
    state_->tasks.push_back(std::move(task));
  }
  state_->work.notify_one();
}

void HostStream::synchronize() {
  if (std::this_thread::get_id() == state_->thread.get_id()) {
    core::fail(ErrorKind::kBadArgument, "stream '{}': synchronize was called by one of its own tasks",
               state_->name);
  }
  std::exception_ptr error;
  {
    std::unique_lock lock(state_->mutex);
    state_->idle.wait(lock, [&] { return state_->tasks.empty() && !state_->running; });
    error = std::exchange(state_->error, nullptr);
  }
  if (error) std::rethrow_exception(std::move(error));
}

}  // namespace flashoverlap

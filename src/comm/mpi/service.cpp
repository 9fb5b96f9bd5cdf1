#include "comm/mpi/service.h"

#include <pthread.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace flashoverlap::comm::mpi {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kQuietInterval = 50ms;
constexpr auto kUrgentInterval = 2ms;
// For the others to throw their error, and to say so, before this process ends and its launcher ends them.
constexpr auto kLeaveWithin = 4s;

}  // namespace

Service& Service::instance() {
  static auto* const service = new Service;  // Outlives every other static object.
  return *service;
}

void Service::add(std::shared_ptr<MpiWorld> world) {
  const std::lock_guard lock(mutex_);
  worlds_.push_back(std::move(world));
  if (thread_.joinable()) return;
  is_stopping_ = false;
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "fo-mpi-service");
}

void Service::wake() {
  {
    const std::lock_guard lock(mutex_);
    is_woken_ = true;
  }
  woken_.notify_all();
}

std::vector<std::shared_ptr<MpiWorld>> Service::worlds() {
  const std::lock_guard lock(mutex_);
  return worlds_;
}

void Service::run() {
  while (true) {
    serve_all();
    const auto all = worlds();
    const bool urgent =
        std::any_of(all.begin(), all.end(), [](const auto& world) { return world->is_urgent(); });
    std::unique_lock lock(mutex_);
    woken_.wait_for(lock, urgent ? kUrgentInterval : kQuietInterval,
                    [&] { return is_stopping_ || is_woken_; });
    is_woken_ = false;
    if (is_stopping_) return;
  }
}

void Service::serve_all() {
  for (const auto& world : worlds()) {
    try {
      while (world->serve()) {
      }
      if (!world->is_over()) continue;
      {
        const std::lock_guard lock(mutex_);
        worlds_.erase(std::find(worlds_.begin(), worlds_.end(), world));
      }
      world->free_control();
    } catch (const std::exception& error) {
      // The control channel itself is broken.
      world->abort(error.what());
    }
  }
}

void Service::note_lost_rank() {
  const std::lock_guard lock(mutex_);
  has_lost_rank_ = true;
}

bool Service::has_lost_rank() {
  const std::lock_guard lock(mutex_);
  return has_lost_rank_;
}

bool Service::stop(std::chrono::milliseconds patience) {
  for (const auto& world : worlds()) world->finish();
  const bool good = wait_for_good_end(patience);
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  woken_.notify_all();
  if (thread_.joinable()) thread_.join();
  return good && !has_lost_rank();
}

bool Service::wait_for_good_end(std::chrono::milliseconds patience) {
  Clock::time_point ask_at = Clock::now() + patience;
  std::optional<Clock::time_point> leave_at;
  while (true) {
    const auto all = worlds();
    if (all.empty()) return true;
    const auto now = Clock::now();
    const bool is_bad = std::any_of(all.begin(), all.end(), [](const auto& world) {
      return world->failed() || world->has_calls_in_flight();
    });
    if (is_bad && !leave_at) leave_at = now + kLeaveWithin;
    if (leave_at && now > *leave_at) return false;
    if (!is_bad && now > ask_at) {
      if (!std::all_of(all.begin(), all.end(), [](const auto& world) { return world->all_answer(); })) {
        return false;
      }
      ask_at = Clock::now() + patience;
    }
    wake();
    std::this_thread::sleep_for(kUrgentInterval);
  }
}

}  // namespace flashoverlap::comm::mpi

#include "comm/mpi/backoff.h"

#include <sys/prctl.h>

#include <algorithm>
#include <thread>

namespace flashoverlap::comm::mpi {
namespace {

// Linux may stretch a sleep by 50 us so as to wake several threads at once: more than what we sleep.
void wake_on_time() {
  constexpr unsigned long kSlackNs = 1000;
  thread_local const bool done = prctl(PR_SET_TIMERSLACK, kSlackNs) == 0;
  static_cast<void>(done);
}

}  // namespace

Backoff::Backoff() {
  wake_on_time();
  reset();
}

void Backoff::reset() {
  poll_until_ = Clock::now() + policy.poll_for;
  sleep_ = policy.first_sleep;
}

void Backoff::wait() {
  if (Clock::now() < poll_until_) {
    if (policy.yields) std::this_thread::yield();
    return;
  }
  std::this_thread::sleep_for(sleep_);
  sleep_ = std::min(sleep_ + sleep_ / 4, policy.longest_sleep);
}

}  // namespace flashoverlap::comm::mpi

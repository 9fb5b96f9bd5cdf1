#pragma once

#include <chrono>
#include <thread>

namespace flashoverlap::comm {

/// Between two looks whether the others have come to a meeting in memory, `waited` after the first. Ranks
/// that come at about the same time meet within microseconds; a longer wait gives its core away.
inline void pause_in_meeting(std::chrono::steady_clock::duration waited) {
  if (waited > std::chrono::microseconds(200)) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  } else {
    std::this_thread::yield();
  }
}

}  // namespace flashoverlap::comm

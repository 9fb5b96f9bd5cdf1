#pragma once

#include <chrono>
#include <functional>
#include <stdexcept>
#include <thread>

namespace flashoverlap::test {

/// Returns once `ready` says so. Throws after a minute: what is waited for does not happen.
inline void wait_until(const std::function<bool()>& ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!ready()) {
    if (std::chrono::steady_clock::now() > end)
      throw std::runtime_error("what the test waits for is missing");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace flashoverlap::test

// Delays of the GPU tests.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>
#include <thread>

#include "device.h"
#include "gpu_ranks.h"
#include "gpu_test.h"
#include "peer_kernels.h"

namespace flashoverlap::gpu_test {

/// Lets this rank be late, now on the host, now on the device, now not at all.
class Lateness {
 public:
  Lateness(Rank& rank, std::uint64_t salt)
      : stream_(static_cast<cudaStream_t>(rank.native_stream())),
        rng_(seed() * 1000 + salt * 100 + static_cast<std::uint64_t>(rank.rank)),
        begin_ns_(rank.options.device, 64, "a delay of a test") {}

  void operator()() {
    const auto us = rng_() % 400;
    switch (rng_() % 4) {
      case 0:
        return std::this_thread::sleep_for(std::chrono::microseconds(us));
      case 1:
        cuda::launch_pace_begin(static_cast<std::uint64_t*>(begin_ns_.data()), stream_);
        return cuda::launch_pace_end(static_cast<std::uint64_t*>(begin_ns_.data()), us * 1000, stream_);
      default:
        return;
    }
  }

 private:
  cudaStream_t stream_;
  std::mt19937_64 rng_;
  cuda::DeviceBuffer begin_ns_;
};

/// Calls of an operator, one rank late by turns, and then many in a row without a look at the result between
/// them. `Call`: run_and_check(method, seed, calls).
template <class Call>
void run_with_late_ranks(const Rank& rank, Call& call) {
  for (int i = 0; i < 6; ++i) {
    if (rank.rank == i % 2) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    call.run_and_check(Method::kOverlap, 10 * i);
  }
  call.run_and_check(Method::kOverlap, 99, 20);
}

}  // namespace flashoverlap::gpu_test

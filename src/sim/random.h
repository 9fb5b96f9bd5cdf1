#pragma once

#include <cstdint>

namespace flashoverlap::sim {

/// Random factors around 1. Own arithmetic, because the standard's distributions differ between libraries and
/// a seed must mean the same everywhere.
class Jitter {
 public:
  /// `stream` tells ranks apart.
  Jitter(double relative_deviation, std::uint64_t seed, std::uint64_t stream)
      : deviation_(relative_deviation), state_(seed * 0x9E3779B97F4A7C15U + stream) {}

  /// Mean 1, the given standard deviation, bell-shaped (sum of 12 uniforms), never below 0.05.
  double factor() {
    constexpr double kSmallest = 0.05;
    if (deviation_ == 0) return 1;
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    const double result = 1 + deviation_ * sum;
    return result < kSmallest ? kSmallest : result;
  }

 private:
  /// In [0, 1): splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
  double uniform() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    z ^= z >> 31U;
    return static_cast<double>(z >> 11U) * 0x1.0p-53;
  }

  double deviation_;
  std::uint64_t state_;
};

}  // namespace flashoverlap::sim

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

namespace flashoverlap::test {

/// The seed of a random test: FLASHOVERLAP_TEST_SEED, or 1. Printed with the first use, and shown in every
/// failure through the trace that `SeededTest` sets.
inline std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* text = std::getenv("FLASHOVERLAP_TEST_SEED");
    const std::uint64_t chosen = text == nullptr ? 1 : std::stoull(text);
    std::printf("FLASHOVERLAP_TEST_SEED=%llu\n", static_cast<unsigned long long>(chosen));
    return chosen;
  }();
  return value;
}

/// Base of tests with random input: `rng_` is seeded afresh for each test, from the seed and the test's name.
class SeededTest : public ::testing::Test {
 protected:
  SeededTest() {
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::seed_seq sequence(name.begin(), name.end());
    std::uint32_t mixed[1];
    sequence.generate(mixed, mixed + 1);
    rng_.seed(seed() ^ mixed[0]);
  }

  /// Uniform in [low, high].
  std::int64_t pick(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng_);
  }

  std::mt19937_64 rng_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "FLASHOVERLAP_TEST_SEED=" + std::to_string(seed())};
};

}  // namespace flashoverlap::test

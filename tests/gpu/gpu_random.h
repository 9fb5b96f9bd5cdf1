// Random choices of the GPU tests, from the seed that the program prints.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

#include "flashoverlap/plan_builders.h"
#include "gpu_test.h"

namespace flashoverlap::gpu_test {

class Random {
 public:
  explicit Random(std::uint64_t salt) : engine_(seed() * 1'000'003 + salt) {}

  std::int64_t pick(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return *(values.begin() + pick(0, std::ssize(values) - 1));
  }
  /// Of `size` rows or columns: equal, or of any sizes, empty ones too; in up to 3 parts.
  SliceOptions slices(std::int64_t size, int world_size) {
    SliceOptions slices;
    slices.parts = pick(0, 3);
    if (pick(0, 1) == 0) return slices;
    std::vector<std::int64_t> ends{0, size};
    for (int r = 1; r < world_size; ++r) ends.push_back(pick(0, 2) == 0 ? 0 : pick(0, size));
    std::sort(ends.begin(), ends.end());
    for (std::size_t r = 1; r < ends.size(); ++r) slices.sizes.push_back(ends[r] - ends[r - 1]);
    return slices;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace flashoverlap::gpu_test

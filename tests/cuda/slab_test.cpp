/// Parts of one stretch of memory.
#include "cuda/slab.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <vector>

namespace flashoverlap::cuda {
namespace {

constexpr std::int64_t kUnit = Slab::kAlignment;

TEST(SlabTest, GivesTheFirstPartThatIsLongEnough) {
  Slab slab(10 * kUnit + 7);
  EXPECT_EQ(slab.bytes(), 10 * kUnit);
  EXPECT_EQ(slab.take(3 * kUnit), 0);
  EXPECT_EQ(slab.take(1), 3 * kUnit);
  EXPECT_EQ(slab.take(0), 4 * kUnit) << "even nothing has a place of its own";
  EXPECT_EQ(slab.take(5 * kUnit), 5 * kUnit);
  EXPECT_EQ(slab.take(1), std::nullopt);
  EXPECT_EQ(slab.longest_free(), 0);
  slab.give_back(0);
  EXPECT_EQ(slab.take(4 * kUnit), std::nullopt);
  slab.give_back(3 * kUnit);
  EXPECT_EQ(slab.longest_free(), 4 * kUnit);
  EXPECT_EQ(slab.take(4 * kUnit), 0);
}

TEST(SlabTest, OfNothingHasNothing) {
  for (const std::int64_t bytes : {std::int64_t{0}, kUnit - 1}) {
    Slab slab(bytes);
    EXPECT_EQ(slab.longest_free(), 0);
    EXPECT_EQ(slab.take(1), std::nullopt);
  }
}

// Against a map of bytes: no two parts share any, none is refused for which there is room, and in the end
// all is one.
TEST(SlabTest, RandomParts) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 rng(seed);
    const std::int64_t units = std::uniform_int_distribution<std::int64_t>(1, 60)(rng);
    Slab slab(units * kUnit);
    std::vector<int> owner(static_cast<std::size_t>(units), 0);
    std::map<int, std::pair<std::int64_t, std::int64_t>> parts;  // in units: begin, count
    const auto fill = [&](std::int64_t begin, std::int64_t count, int value) {
      for (std::int64_t i = begin; i < begin + count; ++i) {
        ASSERT_TRUE(value == 0 || owner[static_cast<std::size_t>(i)] == 0) << "seed " << seed;
        owner[static_cast<std::size_t>(i)] = value;
      }
    };
    const auto longest = [&] {
      std::int64_t most = 0;
      std::int64_t run = 0;
      for (const int of : owner) most = std::max(most, run = of == 0 ? run + 1 : 0);
      return most;
    };
    for (int step = 1; step <= 300; ++step) {
      ASSERT_EQ(slab.longest_free(), longest() * kUnit) << "seed " << seed << " step " << step;
      if (!parts.empty() && rng() % 2 == 0) {
        const auto part = std::next(parts.begin(), static_cast<std::ptrdiff_t>(rng() % parts.size()));
        slab.give_back(part->second.first * kUnit);
        fill(part->second.first, part->second.second, 0);
        parts.erase(part);
        continue;
      }
      const std::int64_t count = std::uniform_int_distribution<std::int64_t>(1, 12)(rng);
      const std::int64_t less = std::uniform_int_distribution<std::int64_t>(0, kUnit - 1)(rng);
      const std::optional<std::int64_t> offset = slab.take(count * kUnit - less);
      ASSERT_EQ(offset.has_value(), longest() >= count) << "seed " << seed << " step " << step;
      if (!offset) continue;
      ASSERT_EQ(*offset % kUnit, 0);
      fill(*offset / kUnit, count, step);
      parts[step] = {*offset / kUnit, count};
    }
    for (const auto& [step, part] : parts) slab.give_back(part.first * kUnit);
    EXPECT_EQ(slab.longest_free(), units * kUnit) << "seed " << seed;
  }
}

}  // namespace
}  // namespace flashoverlap::cuda

#include "core/median.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/seed.h"

namespace flashoverlap::test {
namespace {

TEST(Median, OfFewValues) {
  EXPECT_EQ(core::median({}), 0);
  EXPECT_EQ(core::median({7}), 7);
  EXPECT_EQ(core::median({9, 1}), 5);
  EXPECT_EQ(core::median({9, 1, 2}), 2);
  EXPECT_EQ(core::median({4, 1, 3, 2}), 2.5);
}

using MedianOfMany = SeededTest;

TEST_F(MedianOfMany, IsTheMiddleOfTheSortedValues) {
  for (int round = 0; round < 200; ++round) {
    std::vector<double> values(static_cast<std::size_t>(pick(1, 40)));
    for (double& value : values) value = static_cast<double>(pick(-9, 9));
    const double median = core::median(values);
    std::sort(values.begin(), values.end());
    const std::size_t n = values.size();
    EXPECT_EQ(2 * median, values[(n - 1) / 2] + values[n / 2]);
  }
}

}  // namespace
}  // namespace flashoverlap::test

#include "flashoverlap/bandwidth_curve.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap {
namespace {

using test::SeededTest;

constexpr std::int64_t kMib = 1 << 20;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

BandwidthCurve rates(const std::vector<BandwidthCurve::Rate>& list) {
  return BandwidthCurve::from_rates(list, "test");
}

TEST(BandwidthCurve, OnePointIsAConstantBandwidth) {
  const BandwidthCurve curve = rates({{kMib, 100}});
  EXPECT_NEAR(curve.time_us(4 * kMib), 41.94304, 1e-9);  // known fault B21
  EXPECT_NEAR(curve.time_us(kMib), 10.48576, 1e-9);
  EXPECT_NEAR(curve.time_us(1), 1e-5, 1e-15);
  EXPECT_DOUBLE_EQ(curve.bandwidth_gbps(400 * kMib), 100);
}

TEST(BandwidthCurve, ALinkIsExactEverywhere) {
  const BandwidthCurve curve = BandwidthCurve::from_link(7, 50, "link");
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{1000}, kMib, 5000 * kMib}) {
    EXPECT_DOUBLE_EQ(curve.time_us(bytes), 7 + static_cast<double>(bytes) / 50e3);
  }
  EXPECT_EQ(curve.time_us(0), 0);
  EXPECT_EQ(curve.bandwidth_gbps(0), 0);
}

// 4 bytes in 4 ms, which is what a link is paced to when the GEMM has one element and its machine is busy.
TEST(BandwidthCurve, ALinkMayBeVerySlow) {
  const BandwidthCurve curve = BandwidthCurve::from_link(10, 1e-6, "slow");
  EXPECT_DOUBLE_EQ(curve.time_us(4), 10 + 4000);
  EXPECT_DOUBLE_EQ(curve.time_us(std::int64_t{1} << 40),
                   10 + 1000.0 * static_cast<double>(std::int64_t{1} << 40));
}

TEST(BandwidthCurve, TwoPointsOfAnIdealLinkGiveItsLatencyOnBothSides) {
  const auto at = [](double bytes) { return CurvePoint{bytes, 10 + bytes / 1e4, 0}; };
  const BandwidthCurve curve({at(1e6), at(1e5)}, "unsorted");
  EXPECT_NEAR(curve.time_us(10), 10.001, 1e-9);
  EXPECT_NEAR(curve.time_us(500000), 60, 1e-9);
  EXPECT_NEAR(curve.time_us(100000000), 10010, 1e-6);
}

TEST(BandwidthCurve, EqualSizesAreJoinedToTheirMeanTime) {
  const BandwidthCurve curve = rates({{kMib, 100}, {kMib, 50}});
  ASSERT_EQ(curve.points().size(), 1U);
  EXPECT_NEAR(curve.time_us(kMib), (10.48576 + 20.97152) / 2, 1e-9);
  EXPECT_EQ(curve.num_repaired(), 1);
}

TEST(BandwidthCurve, TimesThatFallWithSizeAreAveraged) {
  const BandwidthCurve curve = rates({{kMib, 100}, {2 * kMib, 50}, {4 * kMib, 120}});
  const double pooled = (41.94304 + 4 * kMib / 120e3) / 2;
  EXPECT_NEAR(curve.time_us(2 * kMib), pooled, 1e-9);
  EXPECT_NEAR(curve.time_us(4 * kMib), pooled, 1e-9);
  EXPECT_NEAR(curve.time_us(kMib), 10.48576, 1e-9);
  EXPECT_GT(curve.time_us(400 * kMib), 90 * pooled);  // not flat for ever
}

TEST(BandwidthCurve, AFlatEndGoesOnAtItsMeanBandwidth) {
  const BandwidthCurve curve({{1000, 5, 0}, {2000, 5, 0}, {4000, 5, 0}}, "flat");
  EXPECT_DOUBLE_EQ(curve.time_us(8000), 10);
}

TEST(BandwidthCurve, ScaledMultipliesEveryTime) {
  const BandwidthCurve curve = rates({{1000, 1}, {kMib, 100}});
  const BandwidthCurve scaled = curve.scaled(3);
  for (const std::int64_t bytes : {1, 1000, 5000, 2000000}) {
    EXPECT_DOUBLE_EQ(scaled.time_us(bytes), 3 * curve.time_us(bytes));
  }
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "cannot be scaled by 0",
                            static_cast<void>(curve.scaled(0)));
}

TEST(BandwidthCurve, BadSamplesAreNamed) {
  const auto kind = ErrorKind::kBadArgument;
  FLASHOVERLAP_EXPECT_THROW(kind, "curve 'test' has no samples", rates({}));
  FLASHOVERLAP_EXPECT_THROW(kind, "sample 1 (2048 bytes): bandwidth is 0 GB/s",
                            rates({{1024, 1}, {2048, 0}}));
  FLASHOVERLAP_EXPECT_THROW(kind, "bandwidth is -5 GB/s, must be in (0, 1e9]", rates({{1024, -5}}));
  FLASHOVERLAP_EXPECT_THROW(kind, "bandwidth is nan GB/s", rates({{1024, kNan}}));
  FLASHOVERLAP_EXPECT_THROW(kind, "sample 0: bytes is 0, must be in [1, 2^53]", rates({{0, 5}}));
  FLASHOVERLAP_EXPECT_THROW(kind, "bytes is nan", BandwidthCurve({{kNan, 5, 0}}, "test"));
  FLASHOVERLAP_EXPECT_THROW(kind, "time is inf us",
                            BandwidthCurve({{1, std::numeric_limits<double>::infinity(), 0}}, "test"));
  FLASHOVERLAP_EXPECT_THROW(kind, "spread is -1 us", BandwidthCurve({{1, 1, -1}}, "test"));
  FLASHOVERLAP_EXPECT_THROW(kind, "latency is -1 us",
                            static_cast<void>(BandwidthCurve::from_link(-1, 1, "test")));
  FLASHOVERLAP_EXPECT_THROW(kind, "bandwidth is 0 GB/s",
                            static_cast<void>(BandwidthCurve::from_link(1, 0, "test")));
  FLASHOVERLAP_EXPECT_THROW(kind, "a transfer of -1 bytes",
                            static_cast<void>(rates({{1024, 1}}).time_us(-1)));
}

class RandomCurve : public SeededTest {
 protected:
  std::vector<CurvePoint> samples() {
    std::vector<CurvePoint> list(static_cast<std::size_t>(pick(1, 40)));
    for (CurvePoint& point : list) {
      point.bytes = std::floor(std::exp(static_cast<double>(pick(0, 3000)) / 100));
      point.time_us = std::exp(static_cast<double>(pick(-1000, 1500)) / 100);
      point.spread_us = static_cast<double>(pick(0, 5));
    }
    return list;
  }
};

TEST_F(RandomCurve, TimesArePositiveFiniteAndDoNotFallWithSize) {
  for (int round = 0; round < 300; ++round) {
    const BandwidthCurve curve(samples(), "random");
    double last = 0;
    for (std::int64_t bytes = 1; bytes < std::int64_t{1} << 45;
         bytes += std::max<std::int64_t>(1, bytes / 3)) {
      const double time = curve.time_us(bytes);
      ASSERT_TRUE(std::isfinite(time) && time > 0) << bytes;
      ASSERT_GE(time, last * (1 - 1e-12)) << bytes;
      last = time;
    }
  }
}

TEST_F(RandomCurve, TheOrderOfTheSamplesDoesNotMatter) {
  for (int round = 0; round < 100; ++round) {
    std::vector<CurvePoint> list = samples();
    const BandwidthCurve curve(list, "a");
    std::shuffle(list.begin(), list.end(), rng_);
    EXPECT_TRUE(curve == BandwidthCurve(list, "b"));
  }
}

TEST_F(RandomCurve, PiecesSayWhatTimeUsSays) {
  for (int round = 0; round < 50; ++round) {
    const BandwidthCurve curve(samples(), "random");
    const auto& pieces = curve.pieces();
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const auto first = static_cast<std::int64_t>(std::max(1.0, pieces[i].first_bytes));
      EXPECT_EQ(curve.time_us(first), pieces[i].time_us(static_cast<double>(first)));
      if (i > 0) {
        EXPECT_GT(pieces[i].first_bytes, pieces[i - 1].first_bytes);
      }
    }
  }
}

}  // namespace
}  // namespace flashoverlap

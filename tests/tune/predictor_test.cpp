#include "flashoverlap/predictor.h"

#include <gtest/gtest.h>

#include <limits>

#include "flashoverlap/plan_builders.h"
#include "support/throws.h"

namespace flashoverlap {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Four waves of 10 us and 1000 bytes; a transfer takes 2 us + 1 us per 1000 bytes.
OverlapCost four_waves() {
  return {.finish_us = {10, 20, 30, 40},
          .bytes = {1000, 1000, 1000, 1000},
          .curve = BandwidthCurve::from_link(2, 1, "test")};
}

double total(const OverlapCost& cost, const std::vector<std::int64_t>& partition) {
  return predict(cost, partition).total_us;
}

TEST(Predict, ComputeBoundByHand) {
  const OverlapCost cost = four_waves();
  EXPECT_DOUBLE_EQ(total(cost, {4}), 40 + 6);
  EXPECT_DOUBLE_EQ(total(cost, {3, 1}), 40 + 3);
  EXPECT_DOUBLE_EQ(total(cost, {1, 1, 1, 1}), 40 + 3);
}

TEST(Predict, CommunicationBoundByHand) {
  OverlapCost cost = four_waves();
  cost.curve = BandwidthCurve::from_link(5, 0.05, "slow");  // 5 us + 20 us per wave
  cost.signal_us = 1;
  // 1: ready 10, begins 11, ends 36; 2..3: ready 30, begins 36, ends 81; 4: ends 106.
  const Prediction prediction = predict(cost, std::vector<std::int64_t>{1, 2, 1});
  ASSERT_EQ(prediction.groups.size(), 3U);
  EXPECT_DOUBLE_EQ(prediction.groups[0].begin_us, 11);
  EXPECT_DOUBLE_EQ(prediction.groups[0].end_us, 36);
  EXPECT_DOUBLE_EQ(prediction.groups[1].begin_us, 36);
  EXPECT_DOUBLE_EQ(prediction.groups[1].end_us, 81);
  EXPECT_EQ(prediction.groups[1].bytes, 2000);
  EXPECT_DOUBLE_EQ(prediction.total_us, 106);
  EXPECT_DOUBLE_EQ(prediction.compute_us, 40);
  EXPECT_DOUBLE_EQ(prediction.exposed_us, 66);
  EXPECT_DOUBLE_EQ(prediction.communication_us, 25 + 45 + 25);
}

TEST(Predict, RestoreDependsOnWhetherThereIsOneGroup) {
  OverlapCost cost = four_waves();
  cost.restore_us = 7;
  cost.single_group_restore_us = 3;
  EXPECT_DOUBLE_EQ(total(cost, {4}), 46 + 3);
  EXPECT_DOUBLE_EQ(total(cost, {3, 1}), 43 + 7);
}

TEST(Predict, CommunicationSlowsTheWavesBesideIt) {
  OverlapCost cost = four_waves();
  cost.curve =
      BandwidthCurve::from_link(0, 0.1, "busy all the time");  // 40 us for all, 30 us of computing beside it
  cost.slowdown = 1.5;
  EXPECT_DOUBLE_EQ(predict(cost, std::vector<std::int64_t>{3, 1}).compute_us, 10 + 30 * 1.5);
  EXPECT_DOUBLE_EQ(predict(cost, std::vector<std::int64_t>{4}).compute_us, 40);
  cost.curve = BandwidthCurve::from_link(0, 0.4, "busy a third of the time");  // 10 us of 30
  EXPECT_DOUBLE_EQ(predict(cost, std::vector<std::int64_t>{3, 1}).compute_us, 10 + 30 * (1 + 0.5 / 3));
}

TEST(Predict, CommunicationStealsTimePerByte) {
  OverlapCost cost = four_waves();
  cost.steal_us_per_mib = 1024.0 * 1024 / 1000;  // 1 us per wave's bytes
  EXPECT_DOUBLE_EQ(predict(cost, std::vector<std::int64_t>{1, 3}).compute_us, 43);
  EXPECT_DOUBLE_EQ(predict(cost, std::vector<std::int64_t>{4}).compute_us, 40);
}

TEST(Predict, NothingTakesNoTime) {
  const OverlapCost cost{.finish_us = {}, .bytes = {}, .curve = BandwidthCurve::from_link(1, 1, "test")};
  EXPECT_EQ(total(cost, {}), 0);
  EXPECT_EQ(lower_bound_us(cost), 0);
}

TEST(Predict, EqualBytesTakeEqualTimeWhateverTheType) {  // known fault B21
  MachineProfile machine;
  machine.units = 4;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    machine.gemm.kernels.push_back({dtype, 64, 64, 1, 10, RaggedTiles::kPadded, "test"});
  }
  machine.curves.push_back({.collective = TransferKind::kAllReduce,
                            .world_size = 2,
                            .units = 0,
                            .dtype = {},
                            .curve = BandwidthCurve::from_rates({{1 << 20, 100}}, "test"),
                            .source = "test"});
  PlanOptions options{.world_size = 2,
                      .dtype = DType::kFloat32,
                      .m = 64,
                      .n = 1024,
                      .k = 32,
                      .tile_m = 64,
                      .tile_n = 64,
                      .resources = {},
                      .partition = {}};
  options.resources.compute_units = 4;
  options.partition = {1, 1, 1, 1};
  const OverlapCost single = overlap_cost(std::vector{plan_all_reduce(options)}, machine);
  options.dtype = DType::kFloat16;
  options.n = 2048;
  options.partition = std::vector<std::int64_t>(8, 1);
  const OverlapCost half = overlap_cost(std::vector{plan_all_reduce(options)}, machine);
  EXPECT_EQ(single.bytes, std::vector<std::int64_t>(4, 64 * 256 * 4));
  EXPECT_EQ(half.bytes, std::vector<std::int64_t>(8, 64 * 256 * 2));
  EXPECT_EQ(predict(single, std::vector<std::int64_t>{4}).communication_us,
            predict(half, std::vector<std::int64_t>{8}).communication_us);
}

TEST(LowerBound, HoldsForTheExample) {
  OverlapCost cost = four_waves();
  EXPECT_DOUBLE_EQ(lower_bound_us(cost), 43);
  cost.curve = BandwidthCurve::from_link(0, 0.01, "slow");
  EXPECT_DOUBLE_EQ(lower_bound_us(cost), 10 + 400);
}

TEST(Algorithm1, ByHand) {
  const std::vector<std::int64_t> bytes(4, 1000);
  const BandwidthCurve curve = BandwidthCurve::from_link(2, 0.1, "test");  // 12 us per wave
  const auto predicted = [&](const std::vector<std::int64_t>& partition) {
    return predict_algorithm1_us(40, bytes, curve, partition);
  };
  EXPECT_DOUBLE_EQ(predicted({4}), 40 + 42);
  EXPECT_DOUBLE_EQ(predicted({1, 1, 1, 1}), 10 + 4 * 12);
  EXPECT_DOUBLE_EQ(predicted({1, 2, 1}), 30 + 22 + 12);
}

TEST(Algorithm1, IsOursWithoutLatencies) {
  OverlapCost cost = four_waves();
  for (const std::vector<std::int64_t>& partition :
       {std::vector<std::int64_t>{4}, {1, 3}, {2, 2}, {1, 1, 2}, {1, 1, 1, 1}}) {
    EXPECT_DOUBLE_EQ(predict_algorithm1_us(40, cost.bytes, cost.curve, partition), total(cost, partition));
  }
}

TEST(Predict, BadInputIsNamed) {
  const auto kind = ErrorKind::kBadArgument;
  const auto with = [](auto change) {
    OverlapCost cost = four_waves();
    change(cost);
    static_cast<void>(total(cost, {4}));
  };
  FLASHOVERLAP_EXPECT_THROW(kind, "times of 3 waves and bytes of 4",
                            with([](auto& c) { c.finish_us.pop_back(); }));
  FLASHOVERLAP_EXPECT_THROW(kind, "wave 2 finishes at 5 us, must be finite and not before 20 us",
                            with([](auto& c) { c.finish_us[2] = 5; }));
  FLASHOVERLAP_EXPECT_THROW(kind, "wave 0 finishes at nan us", with([](auto& c) { c.finish_us[0] = kNan; }));
  FLASHOVERLAP_EXPECT_THROW(kind, "wave 1 has -1 bytes", with([](auto& c) { c.bytes[1] = -1; }));
  FLASHOVERLAP_EXPECT_THROW(kind, "more than 2^53 bytes",
                            with([](auto& c) { c.bytes[1] = std::int64_t{1} << 60; }));
  FLASHOVERLAP_EXPECT_THROW(kind, "slowdown is 0.5", with([](auto& c) { c.slowdown = 0.5; }));
  FLASHOVERLAP_EXPECT_THROW(kind, "signal_us is -1", with([](auto& c) { c.signal_us = -1; }));
  FLASHOVERLAP_EXPECT_THROW(kind, "steal_us_per_mib is nan",
                            with([](auto& c) { c.steal_us_per_mib = kNan; }));
  const OverlapCost cost = four_waves();
  FLASHOVERLAP_EXPECT_THROW(kind, "partition (3) sums to 3, must sum to 4 waves",
                            static_cast<void>(total(cost, {3})));
  FLASHOVERLAP_EXPECT_THROW(kind, "partition (0, 4) must be positive",
                            static_cast<void>(total(cost, {0, 4})));
  FLASHOVERLAP_EXPECT_THROW(kind, "partition (-1, 5)", static_cast<void>(total(cost, {-1, 5})));
  FLASHOVERLAP_EXPECT_THROW(kind, "GEMM duration is nan us",
                            static_cast<void>(predict_algorithm1_us(kNan, cost.bytes, cost.curve, {})));
}

}  // namespace
}  // namespace flashoverlap

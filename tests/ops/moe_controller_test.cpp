#include "flashoverlap/moe_controller.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "support/throws.h"

namespace flashoverlap {
namespace {

using testing::HasSubstr;

MoeControllerOptions bounds() {
  MoeControllerOptions options;
  options.max_consumers = 6;
  options.max_segment_bands = 4;
  options.total_units = 12;
  return options;
}

constexpr MoeObservation kBacklog{1000, 400, 0};
constexpr MoeObservation kIdle{1000, 0, 0.95};
constexpr MoeObservation kFine{1000, 30, 0.5};

TEST(MoeController, WaitsForPatienceThenTakesOneStep) {
  MoeController c(bounds(), {.consumers = 2, .segment_bands = 2});
  EXPECT_EQ(c.setting(), (MoeSetting{2, 10, 2}));
  EXPECT_THAT(c.observe(kBacklog), HasSubstr("once more"));
  EXPECT_EQ(c.setting().consumers, 2);
  EXPECT_THAT(c.observe(kBacklog), HasSubstr("backlog of 400 us in 1000 us"));
  EXPECT_EQ(c.setting(), (MoeSetting{3, 9, 2})) << "the unit comes from the producer";
}

TEST(MoeController, OneCallOutOfRangeChangesNothing) {
  MoeController c(bounds(), {.consumers = 2, .segment_bands = 2});
  for (int i = 0; i < 10; ++i) {
    c.observe(kBacklog);
    EXPECT_THAT(c.observe(kFine), HasSubstr("in range"));
  }
  EXPECT_EQ(c.setting(), (MoeSetting{2, 10, 2}));
}

TEST(MoeController, TakesBackAStepThatCosts) {
  MoeController c(bounds(), {.consumers = 2, .segment_bands = 2});
  c.observe(kBacklog);
  c.observe(kBacklog);
  ASSERT_EQ(c.setting().consumers, 3);
  constexpr MoeObservation kWorse{1200, 400, 0};
  EXPECT_THAT(c.observe(kWorse), HasSubstr("trying"));
  EXPECT_THAT(c.observe(kWorse), HasSubstr("back to 2 consumers, 10 compute units"));
  for (int i = 0; i < 8; ++i) c.observe(kBacklog);
  EXPECT_EQ(c.setting().consumers, 2) << "it must not swing";
  EXPECT_THAT(c.observe(kBacklog), HasSubstr("was better"));
  // Another load: worth another try.
  constexpr MoeObservation kOther{2000, 900, 0};
  c.observe(kOther);
  c.observe(kOther);
  EXPECT_EQ(c.setting().consumers, 3);
}

// A backlog that no consumer shortens, and consumers that each take 4 % of the producer.
TEST(MoeController, StepsThatEachCostLittleDoNotAddUp) {
  MoeControllerOptions options = bounds();
  options.max_consumers = 10;
  MoeController c(options, {.consumers = 1, .segment_bands = 1});
  for (int i = 0; i < 60; ++i) {
    const double producer_us = 1000 * std::pow(1.04, static_cast<double>(c.setting().consumers));
    c.observe({producer_us, 100, 0});
  }
  EXPECT_LE(c.setting().consumers, 2);
}

TEST(MoeController, StaysInItsBounds) {
  MoeController more(bounds(), {.consumers = 5, .segment_bands = 4});
  for (int i = 0; i < 40; ++i) more.observe(kBacklog);
  EXPECT_EQ(more.setting(), (MoeSetting{6, 6, 1}));
  EXPECT_THAT(more.observe(kBacklog), HasSubstr("at its bounds"));
  MoeController less(bounds(), {.consumers = 3, .segment_bands = 1});
  for (int i = 0; i < 40; ++i) less.observe(kIdle);
  EXPECT_EQ(less.setting(), (MoeSetting{1, 11, 4}));
}

TEST(MoeController, FrozenChangesNothing) {
  MoeController c(bounds(), {.consumers = 2, .segment_bands = 2});
  c.freeze(true);
  for (int i = 0; i < 10; ++i) EXPECT_THAT(c.observe(kBacklog), HasSubstr("frozen"));
  EXPECT_EQ(c.setting(), (MoeSetting{2, 10, 2}));
}

/// A machine: tiles share 12 units' work, consumers put at a rate each.
MoeObservation machine(const MoeSetting& s, double work, double bytes) {
  const double producer_us = work / static_cast<double>(s.compute_units);
  const double send_us = bytes / static_cast<double>(s.consumers);
  const double backlog_us =
      std::max(0.0, send_us - producer_us) + 10.0 * static_cast<double>(s.segment_bands);
  return {producer_us, backlog_us, std::max(0.0, 1 - send_us / producer_us)};
}

double best_static(double work, double bytes) {
  double best = INFINITY;
  for (std::int64_t consumers = 1; consumers <= 6; ++consumers) {
    const MoeObservation o = machine({consumers, 12 - consumers, 1}, work, bytes);
    best = std::min(best, o.producer_us + o.backlog_us);
  }
  return best;
}

TEST(MoeController, ComesWithinFivePercentOfTheBestStaticSettingIn20Calls) {
  MoeController c(bounds(), {.consumers = 1, .segment_bands = 1});
  const auto settle = [&](double work, double bytes) {
    for (int call = 0; call < 20; ++call) c.observe(machine(c.setting(), work, bytes));
    const MoeObservation o = machine(c.setting(), work, bytes);
    EXPECT_LE(o.producer_us + o.backlog_us, 1.05 * best_static(work, bytes))
        << "work " << work << ", bytes " << bytes << ", " << c.setting().consumers << " consumers";
  };
  settle(10000, 1000);
  settle(10000, 4000);  // the routing changes mid-run
  settle(10000, 1000);
  settle(20000, 6000);
}

TEST(MoeController, SameObservationsSameDecisions) {
  MoeController a(bounds(), {.consumers = 2, .segment_bands = 2});
  MoeController b(bounds(), {.consumers = 2, .segment_bands = 2});
  for (int i = 0; i < 50; ++i) {
    const MoeObservation o = machine(a.setting(), 10000 + 100 * i, 1000 + 97 * (i % 13));
    EXPECT_EQ(a.observe(o), b.observe(o));
    EXPECT_EQ(a.setting(), b.setting());
  }
}

TEST(MoeController, Errors) {
  const auto message = [](const std::function<void(MoeControllerOptions&)>& change) {
    MoeControllerOptions options = bounds();
    change(options);
    return test::message_of(ErrorKind::kBadArgument, [&] { MoeController c(options, {}); });
  };
  EXPECT_THAT(message([](auto& o) { o.min_consumers = 0; }), HasSubstr("min_consumers is 0; at least 1"));
  EXPECT_THAT(message([](auto& o) { o.max_consumers = 12; }), HasSubstr("max_consumers is 12 of 12 units"));
  EXPECT_THAT(message([](auto& o) { o.patience = 0; }), HasSubstr("patience is 0"));
  EXPECT_THAT(message([](auto& o) { o.high_idle = 1.5; }), HasSubstr("high_idle is 1.5; a share in [0, 1]"));
  MoeController c(bounds(), {});
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "backlog_us is nan", c.observe({1, NAN, 0}));
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "consumer_idle is 2", c.observe({1, 1, 2}));
}

}  // namespace
}  // namespace flashoverlap

#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <vector>

#include "flashoverlap/call_tuner.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/operators.h"
#include "support/throws.h"

/// What a context's tuner decides reaches the plans of all ranks.
namespace flashoverlap {
namespace {

MachineProfile machine(double overhead_us) {
  MachineProfile profile;
  profile.name = "test";
  profile.units = 2;
  profile.gemm.kernels = {{DType::kFloat32, 32, 64, overhead_us, 10, RaggedTiles::kPadded, "test"}};
  profile.levels = {{.name = "link", .ranks = 0, .latency_us = 1, .bandwidth_gbps = 1, .source = "test"}};
  return profile;
}

std::vector<OverlapPlan> plans_with(const std::vector<std::shared_ptr<const CallTuner>>& tuners,
                                    const GemmOptions& options) {
  std::vector<OverlapPlan> plans(tuners.size());
  run_ranks(static_cast<int>(tuners.size()), {}, [&](const std::shared_ptr<Communicator>& communicator) {
    ContextOptions context_options;
    context_options.num_threads = 2;
    Context context(communicator, context_options);
    const auto rank = static_cast<std::size_t>(communicator->rank());
    context.set_tuner(tuners[rank]);
    plans[rank] = GemmAllReduce(context, options).plan();
  });
  return plans;
}

std::shared_ptr<const CallTuner> tuner(double overhead_us, std::vector<TunedCall>* heard = nullptr) {
  CallTuner::Options options;
  options.machine = machine(overhead_us);
  if (heard != nullptr) options.on_choice = [heard](const TunedCall& choice) { heard->push_back(choice); };
  return std::make_shared<const CallTuner>(std::move(options));
}

GemmOptions open_options() {
  GemmOptions options;
  options.m = 256;
  options.n = 256;
  options.k = 64;
  return options;
}

TEST(TunedChoice, RankZeroDecidesForAll) {
  // Alone, the ranks would come to different answers: long waves hide transfers, short ones do not.
  std::vector<TunedCall> heard;
  const std::vector<OverlapPlan> plans =
      plans_with({tuner(1000, &heard), tuner(0), tuner(3)}, open_options());
  ASSERT_EQ(heard.size(), 1U);
  EXPECT_EQ(heard[0].origin, ChoiceOrigin::kPredicted);
  EXPECT_GT(heard[0].partition.size(), 1U);
  for (const OverlapPlan& plan : plans) {
    EXPECT_EQ(plan.partition(), heard[0].partition);
    EXPECT_EQ(plan.grid.tile_m(), 32);
    EXPECT_EQ(plan.grid.tile_n(), 64);
    EXPECT_EQ(plan.agreement, plans[0].agreement);
  }
}

TEST(TunedChoice, WhatTheCallerGivesStays) {
  GemmOptions options = open_options();
  options.tile_m = options.tile_n = 64;
  std::vector<TunedCall> heard;
  EXPECT_EQ(plans_with({tuner(1000, &heard), tuner(1000)}, options)[1].grid.tile_m(), 64);
  EXPECT_EQ(heard.size(), 1U);
  options.partition = {3, 5};
  EXPECT_EQ(plans_with({tuner(1000, &heard), tuner(1000)}, options)[1].partition(), options.partition);
  EXPECT_EQ(heard.size(), 1U);
}

TEST(TunedChoice, NothingKnownGivesTheDefault) {
  const auto ignorant = std::make_shared<const CallTuner>(CallTuner::Options{});
  const std::vector<OverlapPlan> plans = plans_with({ignorant, ignorant}, open_options());
  EXPECT_EQ(plans[0].partition(), default_partition(plans[0].num_waves()));
}

TEST(TunedChoice, BadShapesFailOnAllRanks) {
  GemmOptions options = open_options();
  options.m = -1;
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "m",
                            static_cast<void>(plans_with({tuner(1), tuner(1)}, options)));
}

}  // namespace
}  // namespace flashoverlap

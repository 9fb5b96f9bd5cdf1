#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
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

/// Plans only, with tiles and units of its own, as executors of GPUs.
class Device final : public Executor {
 public:
  static constexpr PlanShape kShape{.tile_m = 256, .tile_n = 128, .swizzle = 2, .resources = {58, 16}};

  [[nodiscard]] std::unique_ptr<PreparedPlan> prepare(OverlapPlan plan) override {
    struct Prepared final : PreparedPlan {
      explicit Prepared(OverlapPlan made) : own(std::move(made)) {}
      [[nodiscard]] const OverlapPlan& plan() const override { return own; }
      OverlapPlan own;
    };
    return std::make_unique<Prepared>(std::move(plan));
  }
  void execute(PreparedPlan& /*plan*/, const Operands& /*operands*/, Mode /*mode*/,
               Timeline* /*timeline*/) override {}
  [[nodiscard]] std::optional<PlanShape> suggest(const ProductShape& /*product*/) const override {
    return kShape;
  }
  [[nodiscard]] std::int64_t workspace_bytes() const override { return 0; }
};

enum class Which { kAllReduce, kReduceScatter, kAllToAll };

/// Of rank 0 of 2, bf16.
OverlapPlan device_plan(Which which, std::int64_t m, std::int64_t n,
                        const std::shared_ptr<const CallTuner>& tuner = nullptr, std::int64_t tile_m = 0) {
  OverlapPlan plan;
  run_ranks(2, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context(communicator, std::make_unique<Device>());
    context.set_tuner(tuner);
    GemmOptions options;
    options.m = m;
    options.n = n;
    options.k = 1024;
    options.dtype = DType::kBFloat16;
    options.tile_m = tile_m;
    options.tile_n = tile_m == 0 ? 0 : 128;
    const auto rows = static_cast<std::size_t>(m);
    std::vector<std::int32_t> destinations(rows);
    for (std::size_t row = 0; row < rows; ++row) destinations[row] = static_cast<std::int32_t>(row % 2);
    OverlapPlan own;
    switch (which) {
      case Which::kAllReduce:
        own = GemmAllReduce(context, options).plan();
        break;
      case Which::kReduceScatter:
        own = GemmReduceScatter(context, options).plan();
        break;
      case Which::kAllToAll:
        own = GemmAllToAll(context, options, destinations).plan();
        break;
    }
    if (communicator->rank() == 0) plan = std::move(own);
  });
  return plan;
}

TEST(TunedChoice, OnADeviceGroupsOfTheDefaultHaveEightMib) {
  constexpr double kMib = 1 << 20;
  for (const Which which : {Which::kAllReduce, Which::kReduceScatter, Which::kAllToAll}) {
    // A wave has 3.6 MiB. 16 MiB are not enough for two groups of three waves, 32 MiB make three.
    EXPECT_EQ(device_plan(which, 1024, 8192).groups.size(), 1U);
    EXPECT_EQ(device_plan(which, 2048, 8192).groups.size(), 3U);
    EXPECT_EQ(device_plan(which, 16384, 8192).groups.size(), 8U);
    for (const std::int64_t m : {2048, 4096, 8192}) {
      const OverlapPlan plan = device_plan(which, m, 8192);
      const std::vector<std::int64_t> partition = plan.partition();
      const double wave_mib =
          static_cast<double>(m * 8192 * 2) / kMib / static_cast<double>(plan.num_waves());
      EXPECT_GT(partition.size(), 1U);
      for (const std::int64_t waves : partition) EXPECT_GE(static_cast<double>(waves) * wave_mib, 8);
    }
  }
  // The same where there is a tuner that knows nothing.
  const auto ignorant = std::make_shared<const CallTuner>(CallTuner::Options{});
  EXPECT_EQ(device_plan(Which::kAllReduce, 2048, 8192, ignorant).partition(),
            device_plan(Which::kAllReduce, 2048, 8192).partition());
}

TEST(TunedChoice, ATunerThatKnowsTheDeviceDecides) {
  CallTuner::Options options;
  options.machine = load_machine_profile("4x-h200-nvlink");
  std::vector<TunedCall> heard;
  options.on_choice = [&heard](const TunedCall& choice) { heard.push_back(choice); };
  const auto knowing = std::make_shared<const CallTuner>(options);
  const OverlapPlan plan = device_plan(Which::kAllReduce, 8192, 8192, knowing);
  ASSERT_EQ(heard.size(), 1U);
  EXPECT_EQ(heard[0].origin, ChoiceOrigin::kPredicted) << heard[0].explanation;
  EXPECT_GT(heard[0].partition.size(), 1U);
  EXPECT_EQ(plan.partition(), heard[0].partition);
  EXPECT_EQ(plan.grid.tile_m(), heard[0].tile.tile_m);
  EXPECT_EQ(plan.grid.tile_n(), heard[0].tile.tile_n);
  EXPECT_EQ(plan.resources.compute_units, Device::kShape.resources.compute_units);
  // The caller's tile stays.
  EXPECT_EQ(device_plan(Which::kAllReduce, 8192, 8192, knowing, 128).grid.tile_m(), 128);
}

TEST(TunedChoice, BadShapesFailOnAllRanks) {
  GemmOptions options = open_options();
  options.m = -1;
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "m",
                            static_cast<void>(plans_with({tuner(1), tuner(1)}, options)));
}

/// Of rank 0, on a link of this speed; `parts`: the caller's.
std::int64_t num_transfers(double gbps, std::int64_t parts, std::vector<PartsChoice>& heard) {
  std::vector<std::shared_ptr<const CallTuner>> tuners;
  for (int rank = 0; rank < 3; ++rank) {
    CallTuner::Options options;
    options.machine = machine(3);
    // The others would come to another answer.
    options.machine->levels[0].bandwidth_gbps = rank == 0 ? gbps : 1000;
    if (rank == 0) options.on_parts = [&heard](const PartsChoice& choice) { heard.push_back(choice); };
    if (rank != 0) options.on_parts = [](const PartsChoice&) { ADD_FAILURE() << "asked"; };
    tuners.push_back(std::make_shared<const CallTuner>(std::move(options)));
  }
  std::vector<std::vector<std::int64_t>> transfers(3);  // of each rank, by operator
  run_ranks(3, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    ContextOptions context_options;
    context_options.num_threads = 2;
    Context context(communicator, context_options);
    const auto rank = static_cast<std::size_t>(communicator->rank());
    context.set_tuner(tuners[rank]);
    const GemmOptions options{.m = 1152, .n = 64, .k = 64, .tile_m = 32, .tile_n = 64};
    const SliceOptions slices{.sizes = {}, .parts = parts};
    transfers[rank] = {
        std::ssize(AllGatherGemm(context, options, slices).plan().transfers),
        std::ssize(GemmReduceScatter(context, options, OverlapMethod::kTailFree, slices).plan().transfers)};
  });
  EXPECT_EQ(transfers[1], transfers[0]);
  EXPECT_EQ(transfers[2], transfers[0]);
  return transfers[0][0] + transfers[0][1];
}

TEST(TunedChoice, SlicesAreCutAsPaysOnTheMachineOfRankZero) {
  std::vector<PartsChoice> quick;
  std::vector<PartsChoice> slow;
  EXPECT_GT(num_transfers(0.05, 0, slow), num_transfers(1000, 0, quick));
  ASSERT_EQ(slow.size(), 2U);
  ASSERT_EQ(quick.size(), 2U);
  for (const PartsChoice& choice : slow) EXPECT_GT(choice.cut.parts, 2) << choice.reason;
  for (const PartsChoice& choice : quick) EXPECT_EQ(choice.cut.parts, 0) << choice.reason;
  std::vector<PartsChoice> given;
  // Two exchanges with two others, sent and received, of three parts.
  EXPECT_EQ(num_transfers(0.05, 3, given), 2 * 2 * 2 * 3);
  for (const PartsChoice& choice : given) EXPECT_EQ(choice.cut.parts, 3) << choice.reason;
}

/// What rank 0's machine, of hosts with `ranks_of_host` ranks, makes of OverlapMethod::kAuto on 4 ranks.
struct AutoCall {
  OverlapMethod method = OverlapMethod::kAuto;
  std::vector<std::int64_t> partition;
  std::int64_t num_groups = 0;
  std::vector<OverlapDecision> heard;
};

AutoCall auto_call(std::int64_t ranks_of_host, double host_gbps) {
  AutoCall call;
  std::vector<std::shared_ptr<const CallTuner>> tuners;
  for (int rank = 0; rank < 4; ++rank) {
    CallTuner::Options options;
    options.machine = machine(3);
    if (rank == 0) {
      options.machine->levels[0].ranks = ranks_of_host;
      options.machine->levels.push_back({.name = "host",
                                         .ranks = 0,
                                         .ports = 1,
                                         .latency_us = 1,
                                         .bandwidth_gbps = host_gbps,
                                         .source = "test"});
      options.on_overlap = [&call](const OverlapDecision& decision) { call.heard.push_back(decision); };
    }
    if (rank != 0) options.on_overlap = [](const OverlapDecision&) { ADD_FAILURE() << "asked"; };
    tuners.push_back(std::make_shared<const CallTuner>(std::move(options)));
  }
  std::mutex mutex;
  run_ranks(4, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    ContextOptions context_options;
    context_options.num_threads = 2;
    Context context(communicator, context_options);
    context.set_tuner(tuners[static_cast<std::size_t>(communicator->rank())]);
    const GemmOptions options{.m = 4096, .n = 128, .k = 64};
    const GemmReduceScatter op(context, options, OverlapMethod::kAuto);
    const std::lock_guard lock(mutex);
    if (call.method == OverlapMethod::kAuto) {
      call.method = op.method();
      call.partition = op.plan().partition();
      call.num_groups = std::ssize(op.plan().groups);
    }
    EXPECT_EQ(op.method(), call.method);
    EXPECT_EQ(std::ssize(op.plan().groups), call.num_groups);
  });
  return call;
}

TEST(TunedChoice, TheWayToOverlapIsTheQuickestOnTheMachineOfRankZero) {
  const AutoCall alike = auto_call(4, 1);
  ASSERT_EQ(alike.heard.size(), 1U);
  EXPECT_EQ(alike.method, OverlapMethod::kTailFree) << alike.heard[0].reason;
  const AutoCall hosts = auto_call(2, 0.05);
  EXPECT_EQ(hosts.method, OverlapMethod::kSignal);
  ASSERT_EQ(hosts.heard.size(), 1U);
  EXPECT_NE(hosts.heard[0].way, OverlapWay::kTailFree) << hosts.heard[0].reason;
  EXPECT_EQ(hosts.partition, hosts.heard[0].groups.partition);
  ASSERT_EQ(alike.heard.size(), 1U);
}

}  // namespace
}  // namespace flashoverlap

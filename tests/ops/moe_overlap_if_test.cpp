#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "flashoverlap/moe_layer.h"
#include "ops/moe_chooser.h"
#include "ops/moe_reference.h"
#include "support/ops_call.h"
#include "support/seed.h"
#include "support/throws.h"

/// "Not overlapping where that wins."
namespace flashoverlap::test {
namespace {

using ops::MoeChooser;
using testing::HasSubstr;
using testing::StartsWith;

/// Calls that take `overlap_us` and `serial_us`; returns the methods.
std::vector<Method> calls_of(MoeChooser& chooser, int count, std::int64_t rows, double overlap_us,
                             double serial_us, double& last_us) {
  std::vector<Method> methods;
  for (int i = 0; i < count; ++i) {
    methods.push_back(chooser.next(rows, last_us).method);
    last_us = methods.back() == Method::kOverlap ? overlap_us : serial_us;
  }
  return methods;
}

TEST(MoeChooser, TriesBothAndKeepsTheFaster) {
  for (const bool overlap_wins : {false, true}) {
    MoeChooser chooser;
    double last = 0;
    const auto methods = calls_of(chooser, 30, 100, overlap_wins ? 80 : 120, 100, last);
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(methods[i], i % 2 == 0 ? Method::kOverlap : Method::kSerial) << i;
    }
    const Method expected = overlap_wins ? Method::kOverlap : Method::kSerial;
    for (std::size_t i = 8; i < methods.size(); ++i) EXPECT_EQ(methods[i], expected) << i;
    const std::string reason = chooser.next(100, last).reason;
    EXPECT_EQ(reason, overlap_wins ? "overlapped: 80 us, serial 100 us, medians of 3 calls"
                                   : "serial: 100 us, overlapped 120 us, medians of 3 calls");
  }
}

TEST(MoeChooser, FirstCallsOfEachWayDoNotCount) {
  MoeChooser chooser;
  double last = 0;
  calls_of(chooser, 2, 100, 1e6, 1, last);  // makes plans and buffers: as if serial won by far
  calls_of(chooser, 6, 100, 50, 60, last);
  EXPECT_EQ(chooser.next(100, last).method, Method::kOverlap);
}

TEST(MoeChooser, TriesAgainWhenTheLoadChanges) {
  MoeChooser chooser;
  double last = 0;
  calls_of(chooser, 12, 100, 120, 100, last);
  EXPECT_EQ(chooser.next(125, last).method, Method::kSerial) << "a quarter more is the same load";
  const MoeChooser::Decision again = chooser.next(126, last);
  EXPECT_EQ(again.reason, "trial, call 1 of 8: 126 rows instead of 100");
  last = 0;
  const auto methods = calls_of(chooser, 12, 126, 80, 100, last);
  EXPECT_EQ(methods.back(), Method::kOverlap) << "what held for the load before does not count";
}

TEST(MoeChooser, TriesAgainAfterManyCallsAndDoesWithoutTimes) {
  MoeChooser chooser;
  double last = 0;
  calls_of(chooser, 1000, 100, 120, 100, last);
  EXPECT_EQ(chooser.next(100, last).reason, "trial, call 1 of 8: 1000 calls since the last trial");
  MoeChooser no_times;
  double none = 0;
  EXPECT_EQ(calls_of(no_times, 20, 100, 0, 0, none).size(), 20U);
  EXPECT_THAT(no_times.next(100, 0).reason, StartsWith("trial"));
  MoeChooser empty;
  EXPECT_EQ(calls_of(empty, 9, 0, 2, 1, none).back(), Method::kSerial) << "no rows at all";
}

class MoeOverlapIfTest : public SeededTest {
 protected:
  static MoeLayerOptions small_layer() {
    MoeLayerOptions options;
    options.hidden = 24;
    options.intermediate = 16;
    options.num_experts = 8;
    options.tile_m = 4;
    options.tile_n = 8;
    options.poison_workspace = true;
    return options;
  }

  /// Runs `calls` forward and backward passes on 3 ranks; each is compared with the serial result's bits, and
  /// all ranks must report the same. Returns the reports of rank 0.
  std::vector<MoeReport> run(const MoeLayerOptions& options, int calls, bool machine_everywhere = true) {
    constexpr int kRanks = 3;
    const MoeModel model = random_model(rng_, options);
    const std::uint64_t seed = rng_();
    std::mutex mutex;
    std::vector<MoeReport> reports(at(calls));
    std::vector<std::set<std::string>> told(at(calls));
    on_ranks(kRanks, [&](Context& context, int rank) {
      MoeLayerOptions own = options;
      if (rank != 0 && !machine_everywhere) own.machine = nullptr;
      MoeLayer layer(context, own);
      MoeLayerOptions plain = options;
      plain.overlap_if = MoeOverlapIf::kAlways;
      plain.machine = nullptr;
      MoeLayer serial(context, plain);
      const std::int64_t h = options.hidden;
      std::mt19937_64 own_rng(seed + static_cast<std::uint64_t>(rank));
      const MoeRouting routing = make_routing(RoutingKind::kModerate, rank, kRanks, 19, 8, 2, seed);
      const Values x = random_values(own_rng, 19 * h, DType::kFloat32, 1);
      const MoeWeights weights = weights_of(model, layer);
      Values expected(19 * h, DType::kFloat32);
      Values expected_gradient = expected;
      serial.forward(x.bytes.data(), h, routing, weights, expected.bytes.data(), h, Method::kSerial);
      serial.backward(x.bytes.data(), h, weights, {.input = expected_gradient.bytes.data(), .input_ld = h},
                      Method::kSerial);
      for (int i = 0; i < calls; ++i) {
        Values out(19 * h, DType::kFloat32);
        Values gradient(19 * h, DType::kFloat32);
        out.poison();
        gradient.poison();
        const MoeReport report = layer.forward(x.bytes.data(), h, routing, weights, out.bytes.data(), h);
        const MoeReport back =
            layer.backward(x.bytes.data(), h, weights, {.input = gradient.bytes.data(), .input_ld = h});
        EXPECT_EQ(back.method, report.method);
        if (options.padding == MoePadding::kRagged) {
          EXPECT_EQ(out.bytes, expected.bytes) << "call " << i << ", rank " << rank;
          EXPECT_EQ(gradient.bytes, expected_gradient.bytes) << "call " << i << ", rank " << rank;
        } else {
          EXPECT_LE(relative_error(reference_forward(model, routing, x.exact),
                                   [&](std::int64_t e) { return out.get(e); }),
                    1e-5);
        }
        const std::scoped_lock lock(mutex);
        if (rank == 0) reports[at(i)] = report;
        told[at(i)].insert(fmt::format("{} {}", static_cast<int>(report.method), report.choice));
      }
    });
    for (const auto& of_call : told) EXPECT_EQ(of_call.size(), 1U) << "ranks differ";
    return reports;
  }

  /// What a tile costs, and what a message does.
  static std::shared_ptr<const MachineProfile> machine(double unit_gflops, double latency_us) {
    MachineProfile profile;
    profile.name = "made up";
    profile.units = 2;
    profile.gemm.kernels.push_back({.dtype = DType::kFloat32,
                                    .tile_m = 4,
                                    .tile_n = 8,
                                    .unit_gflops = unit_gflops,
                                    .source = "made up"});
    profile.levels.push_back(
        {.name = "link", .latency_us = latency_us, .bandwidth_gbps = 1, .source = "made up"});
    return std::make_shared<const MachineProfile>(profile);
  }
};

TEST_F(MoeOverlapIfTest, MeasuredTriesBothAndAllRanksDecideAlike) {
  for (const MoePadding padding : {MoePadding::kRagged, MoePadding::kPaper}) {
    MoeLayerOptions options = small_layer();
    options.overlap_if = MoeOverlapIf::kMeasured;
    options.padding = padding;
    if (padding == MoePadding::kPaper) options.order = MoeOrder::kExpertMajor;
    const std::vector<MoeReport> reports = run(options, 11);
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(reports[i].method, i % 2 == 0 ? Method::kOverlap : Method::kSerial) << i;
      EXPECT_EQ(reports[i].choice, fmt::format("trial, call {} of 8: first calls", i + 1));
    }
    // Which way wins is the machine's to say; the reason must fit.
    for (std::size_t i = 8; i < reports.size(); ++i) {
      EXPECT_THAT(reports[i].choice,
                  StartsWith(reports[i].method == Method::kOverlap ? "overlapped: " : "serial: "));
    }
  }
}

TEST_F(MoeOverlapIfTest, PredictedFollowsTheMachineOfRank0) {
  MoeLayerOptions options = small_layer();
  options.overlap_if = MoeOverlapIf::kPredicted;
  // Computing takes long, a message little: everything can be hidden.
  options.machine = machine(0.001, 1);
  for (const MoeReport& report : run(options, 2, false)) {
    EXPECT_EQ(report.method, Method::kOverlap);
    EXPECT_THAT(report.choice, StartsWith("predicted, overlapped: "));
  }
  // Computing takes nothing, a message long, and there are more of them with overlap.
  options.machine = machine(1e6, 1000);
  for (const MoeReport& report : run(options, 2, false)) {
    EXPECT_EQ(report.method, Method::kSerial);
    EXPECT_THAT(report.choice, StartsWith("predicted, serial: "));
  }
}

TEST_F(MoeOverlapIfTest, WhatIsAskedForIsDone) {
  const std::vector<MoeReport> reports = run(small_layer(), 1);
  EXPECT_EQ(reports[0].method, Method::kOverlap);
  EXPECT_EQ(reports[0].choice, "");
}

TEST_F(MoeOverlapIfTest, PredictionNeedsAMachineAtRank0) {
  on_ranks(2, [&](Context& context, int) {
    MoeLayerOptions options = small_layer();
    options.overlap_if = MoeOverlapIf::kPredicted;
    EXPECT_THAT(
        message_of(ErrorKind::kBadArgument, [&] { const MoeLayer layer(context, options); }),
        HasSubstr("overlap_if is 'predicted', but there is no machine; a machine profile is expected"));
  });
}

TEST_F(MoeOverlapIfTest, AMachineWithoutTheTypeIsTheSameErrorOnAllRanks) {
  on_ranks(2, [&](Context& context, int rank) {
    MoeLayerOptions options = small_layer();
    options.dtype = DType::kFloat16;
    options.overlap_if = MoeOverlapIf::kPredicted;
    options.machine = machine(1, 1);
    MoeLayer layer(context, options);
    const MoeRouting routing = make_routing(RoutingKind::kBalanced, rank, 2, 4, 8, 2, 1);
    const Values x(4 * 24, DType::kFloat16);
    const Values weights(8 * 2 * 16 * 24, DType::kFloat16);
    Values out = x;
    EXPECT_THAT(message_of(ErrorKind::kBadArgument,
                           [&] {
                             layer.forward(x.bytes.data(), 24, routing,
                                           {weights.bytes.data(), weights.bytes.data()}, out.bytes.data(),
                                           24);
                           }),
                HasSubstr("f16"));
  });
}

}  // namespace
}  // namespace flashoverlap::test

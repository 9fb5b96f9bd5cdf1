#include "flashoverlap/slice_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "flashoverlap/call_tuner.h"
#include "flashoverlap/plan_builders.h"
#include "support/seed.h"
#include "support/throws.h"

// How finely slices travel where a machine is known.
namespace flashoverlap::test {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

constexpr std::int64_t kTile = 64;

/// A tile of k = 64 takes 65 us.
MachineProfile machine_with(double gbps, double latency_us) {
  MachineProfile machine;
  machine.name = "plain";
  machine.units = 4;
  machine.gemm.kernels = {{DType::kFloat32, kTile, kTile, 1, 8.192, RaggedTiles::kProportional, "test"}};
  machine.signal_us = 1;
  machine.levels = {
      {.name = "link", .ranks = 0, .latency_us = latency_us, .bandwidth_gbps = gbps, .source = "test"}};
  return machine;
}

PlanOptions options_of(std::int32_t world_size) {
  return {.world_size = world_size,
          .m = kTile * 16 * world_size,
          .n = kTile,
          .k = kTile,
          .tile_m = kTile,
          .tile_n = kTile,
          .resources = {.compute_units = 1, .communication_units = 0},
          .partition = {}};
}

PartsRequest request_of(bool gathers, const PlanOptions& options) {
  return {.operation = "test",
          .world_size = options.world_size,
          .plan = [=](std::int32_t rank, const SliceCut& cut) {
            PlanOptions own = options;
            own.rank = rank;
            const SliceOptions slices{.sizes = {}, .parts = cut.parts, .send_channels = cut.send_channels};
            return gathers ? plan_all_gather_gemm(own, slices) : plan_tail_free_reduce_scatter(own, slices);
          }};
}

double simulated_us(const PartsRequest& request, const SliceCut& cut, const MachineProfile& machine) {
  std::vector<OverlapPlan> plans;
  for (std::int32_t rank = 0; rank < request.world_size; ++rank) plans.push_back(request.plan(rank, cut));
  return simulate(plans, machine).total_us;
}

TEST(SliceChoice, SlicesStayWholeWhereNothingShows) {
  for (const bool gathers : {true, false}) {
    // A slice of 256 KiB takes 16 tiles of 65 us, and 262 us.
    const PartsChoice choice = choose_parts(request_of(gathers, options_of(4)), machine_with(1, 3));
    EXPECT_EQ(choice.cut, SliceCut{}) << choice.reason;
    EXPECT_THAT(choice.reason, StartsWith("as few parts as leave no tail: "));
  }
}

TEST(SliceChoice, FinerOnASlowLinkUntilLatenciesCostMore) {
  for (const bool gathers : {true, false}) {
    const PartsRequest request = request_of(gathers, options_of(4));
    const PartsChoice quick = choose_parts(request, machine_with(0.1, 3));
    const PartsChoice slow = choose_parts(request, machine_with(0.1, 2000));
    EXPECT_GT(quick.cut.parts, 2) << quick.reason;
    EXPECT_LT(slow.cut.parts, quick.cut.parts) << slow.reason;
    EXPECT_THAT(quick.reason, HasSubstr(" parts: ")) << quick.reason;
  }
}

// A slice takes 16 tiles of 65 us, 0.26 ms on the wire, and 1.5 ms of latency.
TEST(SliceChoice, SeveralAtATimeWhereLatenciesAreLong) {
  for (const bool gathers : {true, false}) {
    const MachineProfile machine = machine_with(1, 1500);
    PartsRequest request = request_of(gathers, options_of(16));
    const PartsChoice choice = choose_parts(request, machine);
    if (gathers) {  // the others have two by themselves
      EXPECT_GE(choice.cut.send_channels, 2) << choice.reason;
      EXPECT_THAT(choice.reason, HasSubstr(" at a time: "));
    }
    request.given.send_channels = 1;
    const PartsChoice one = choose_parts(request, machine);
    EXPECT_EQ(one.cut.send_channels, 1) << one.reason;
    EXPECT_GT(one.total_us, 1.2 * choice.total_us) << one.reason;
    request.given = {.parts = 3, .send_channels = 2};
    const PartsChoice given = choose_parts(request, machine);
    EXPECT_EQ(given.cut, request.given);
    EXPECT_EQ(given.candidates.size(), 1U);
    EXPECT_EQ(given.total_us, simulated_us(request, request.given, machine));
  }
}

// What is not simulated would not have been chosen.
TEST(SliceChoice, CandidatesThatAreLeftOutAreNoBetter) {
  const MachineProfile machine = machine_with(1, 100);
  for (const bool gathers : {true, false}) {
    const PartsRequest request = request_of(gathers, options_of(6));
    const PartsChoice choice = choose_parts(request, machine);
    int left_out = 0;
    for (const std::int64_t parts : {1, 2, 4, 8, 16}) {
      const auto is_it = [&](const PartsCandidate& candidate) {
        return candidate.cut == SliceCut{.parts = parts};
      };
      left_out += std::ranges::none_of(choice.candidates, is_it) ? 1 : 0;
      EXPECT_GE(simulated_us(request, {.parts = parts}, machine) * 1.005, choice.total_us) << parts;
    }
    EXPECT_GT(left_out, 0) << choice.reason;
  }
}

class RandomSliceChoice : public SeededTest {};

// Against a simulation of each candidate.
TEST_F(RandomSliceChoice, IsWithinHalfAPercentOfTheBestAndTheFirstOfThose) {
  for (int i = 0; i < 12; ++i) {
    const PartsRequest request = request_of(i % 2 == 0, options_of(static_cast<std::int32_t>(pick(2, 5))));
    const MachineProfile machine =
        machine_with(static_cast<double>(pick(1, 100)) / 100, static_cast<double>(pick(0, 300)));
    const PartsChoice choice = choose_parts(request, machine);
    ASSERT_GE(choice.candidates.size(), 2U);
    double best_us = choice.candidates.front().total_us;
    for (const PartsCandidate& candidate : choice.candidates) {
      EXPECT_DOUBLE_EQ(candidate.total_us, simulated_us(request, candidate.cut, machine));
      best_us = std::min(best_us, candidate.total_us);
    }
    for (const PartsCandidate& candidate : choice.candidates) {
      if (candidate.cut == choice.cut) {
        EXPECT_EQ(candidate.total_us, choice.total_us);
        EXPECT_LE(candidate.total_us, 1.005 * best_us);
        break;
      }
      EXPECT_GT(candidate.total_us, 1.005 * best_us);
    }
  }
}

TEST(SliceChoice, StopsWhereThereIsNoMoreToCut) {
  PlanOptions options = options_of(2);
  options.m = kTile * 3 * 2;  // three tiles a slice
  const PartsChoice choice = choose_parts(request_of(true, options), machine_with(1, 3));
  EXPECT_EQ(choice.candidates.back().cut, (SliceCut{.parts = 4}));
  const PartsChoice alone = choose_parts(request_of(true, options_of(1)), machine_with(1, 3));
  EXPECT_EQ(alone.cut, SliceCut{});
}

TEST(SliceChoice, BadRequestsSayWhatIsExpected) {
  const MachineProfile machine = machine_with(1, 3);
  PartsRequest request = request_of(true, options_of(2));
  request.given = {.parts = -1};
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "parts of a slice are -1; expected at least 1",
                            static_cast<void>(choose_parts(request, machine)));
  request.given = {.send_channels = -1};
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "send_channels is -1; expected at least 1",
                            static_cast<void>(choose_parts(request, machine)));
  request.world_size = 0;
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "world size is 0; it must be at least 1",
                            static_cast<void>(choose_parts(request, machine)));
}

TEST(SliceChoice, ATunerWithoutAMachineOrWithAnUnfitOneDoesNotChoose) {
  std::string warning;
  std::string reason;
  CallTuner::Options options;
  options.warn = [&](const std::string& text) { warning = text; };
  options.on_parts = [&](const PartsChoice& choice) { reason = choice.reason; };
  const PartsRequest request = request_of(true, options_of(2));
  EXPECT_FALSE(CallTuner(options).choose_parts(request).has_value());
  EXPECT_THAT(warning, IsEmpty());

  options.machine = machine_with(0.1, 3);
  const auto choice = CallTuner(options).choose_parts(request);
  ASSERT_TRUE(choice.has_value());
  EXPECT_EQ(reason, choice->reason);
  EXPECT_THAT(warning, IsEmpty());

  PlanOptions other = options_of(2);
  other.dtype = DType::kBFloat16;
  EXPECT_FALSE(CallTuner(options).choose_parts(request_of(true, other)).has_value());
  EXPECT_THAT(warning, HasSubstr("test: parts of slices are not predicted: the machine profile has no bf16"));

  other.m = -1;  // the caller's error stays one
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "m must be at least 0, got -1",
                            static_cast<void>(CallTuner(options).choose_parts(request_of(true, other))));
}

}  // namespace
}  // namespace flashoverlap::test

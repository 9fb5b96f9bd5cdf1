#include "flashoverlap/moe_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/throws.h"

namespace flashoverlap {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

/// Balanced: `rows` of each rank for each expert.
MoeChoiceRequest request_for(const MachineProfile& machine, std::int32_t world_size, std::int64_t experts,
                             std::int64_t rows, std::int64_t hidden, std::int64_t intermediate) {
  MoeChoiceRequest request;
  request.options.world_size = world_size;
  request.options.dtype = DType::kBFloat16;
  request.options.num_experts = experts;
  request.options.tile_n = 256;
  request.options.resources = {.compute_units = machine.units, .communication_units = 4};
  request.counts = {world_size, experts,
                    std::vector<std::int64_t>(static_cast<std::size_t>(world_size * experts), rows)};
  request.hidden = hidden;
  request.hidden_cols = 2 * intermediate;
  request.intermediate = intermediate;
  return request;
}

TEST(MoeChoice, OverlapsWhereThereIsEnoughToHideBehind) {
  const MachineProfile machine = load_machine_profile("8x-h200-nvlink");
  const MoeChoice choice = choose_moe(request_for(machine, 4, 16, 512, 4096, 4096), machine);
  EXPECT_TRUE(choice.overlaps()) << choice.reason;
  EXPECT_THAT(choice.reason, StartsWith("overlapped: "));
  EXPECT_GT(choice.dispatch_gemm_us, 0);
  EXPECT_GT(choice.combine_gemm_us, 0);
  EXPECT_EQ(choice.serial.options.transport, MoeTransport::kCollective);
  EXPECT_EQ(choice.serial.options.collective_groups, 1);
  // Neither way can be shorter than its GEMMs.
  EXPECT_GT(choice.best_overlap().total_us(), choice.dispatch_gemm_us + choice.combine_gemm_us);
}

TEST(MoeChoice, DoesNotWhereMessagesAreTooSmallToCut) {
  const MachineProfile machine = load_machine_profile("2x8-h100-infiniband");
  const MoeChoice choice = choose_moe(request_for(machine, 16, 64, 2, 512, 512), machine);
  EXPECT_FALSE(choice.overlaps()) << choice.reason;
  EXPECT_THAT(choice.reason, StartsWith("serial: "));
}

TEST(MoeChoice, TheBestCandidateIsNoWorseThanAnyAlone) {
  const MachineProfile machine = load_machine_profile("2x8-h100-infiniband");
  MoeChoiceRequest request = request_for(machine, 16, 32, 64, 1024, 512);
  request.consumers = {1, 4, 16};
  request.segment_bands = {1, 4};
  const MoeChoice all = choose_moe(request, machine);
  ASSERT_EQ(all.candidates.size(), 6U);
  double best = all.candidates.front().total_us();
  for (const MoeCandidate& candidate : all.candidates) {
    EXPECT_LE(best, candidate.total_us());
    MoeChoiceRequest alone = request;
    alone.consumers = {candidate.options.resources.communication_units};
    alone.segment_bands = {candidate.options.segment_bands};
    EXPECT_EQ(choose_moe(alone, machine).best_overlap().total_us(), candidate.total_us());
    EXPECT_EQ(candidate.options.resources.compute_units + candidate.options.resources.communication_units,
              machine.units);
  }
  request.consumers_take_units = false;
  EXPECT_EQ(choose_moe(request, machine).best_overlap().options.resources.compute_units, machine.units);
}

TEST(MoeChoice, Errors) {
  const MachineProfile machine = load_machine_profile("8x-h200-nvlink");
  MoeChoiceRequest request = request_for(machine, 4, 16, 8, 64, 64);
  const auto message = [&] {
    return test::message_of(ErrorKind::kBadArgument,
                            [&] { static_cast<void>(choose_moe(request, machine)); });
  };
  request.options.resources = {.compute_units = 2, .communication_units = 2};
  EXPECT_THAT(message(), HasSubstr("no number of consumers leaves one of 2 units to compute"));
  request.options.resources = {.compute_units = 2, .communication_units = 1};
  request.segment_bands = {0};
  EXPECT_THAT(message(), HasSubstr("segment_bands must be at least 1, got 0"));
  request.segment_bands = {};
  request.counts.rows.pop_back();
  EXPECT_THAT(message(), HasSubstr("counts are 63 numbers for 4 ranks and 16 experts"));
}

}  // namespace
}  // namespace flashoverlap

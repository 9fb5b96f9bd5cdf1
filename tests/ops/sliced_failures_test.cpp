// What a call in slices that goes wrong leaves behind: an error on every rank within the time-out, naming the
// slice.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/known_faults.h"
#include "support/ops_call.h"
#include "support/throws.h"

namespace flashoverlap::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr std::int64_t kM = 48;
constexpr std::int64_t kN = 32;
constexpr std::int64_t kK = 16;
constexpr std::chrono::milliseconds kShort{400};

GemmOptions small_options() {
  return {.m = kM, .n = kN, .k = kK, .tile_m = 8, .tile_n = 16};
}

enum class Kind { kGather, kScatter, kFromHeads };

std::size_t at(int rank) {
  return static_cast<std::size_t>(rank);
}

std::vector<std::int64_t> slice_sizes_of_k() {
  const std::vector<std::int64_t> begins = slice_begins({}, kK, kRanks);
  return {begins[1], begins[2] - begins[1], begins[3] - begins[2]};
}

/// What each rank threw.
std::vector<std::string> messages_of(const std::function<void(std::shared_ptr<Communicator>)>& body,
                                     std::chrono::milliseconds timeout) {
  std::vector<std::string> messages(kRanks);
  InProcessOptions in_process;
  in_process.timeout = timeout;
  run_ranks(kRanks, in_process, [&](std::shared_ptr<Communicator> communicator) {
    try {
      body(communicator);
    } catch (const Error& error) {
      messages[static_cast<std::size_t>(communicator->rank())] = error.what();
    }
  });
  return messages;
}

std::vector<std::string> run_with_hooks_on_rank_1(Kind kind, const ExecutorHooks& hooks,
                                                  std::chrono::milliseconds timeout) {
  return messages_of(
      [&](std::shared_ptr<Communicator> communicator) {
        const int rank = communicator->rank();
        ContextOptions options{.num_threads = 1, .poison_workspace = true};
        if (rank == 1) options.hooks = hooks;
        Context context(communicator, options);
        // One after the other: two at a time would leave nobody without a slice.
        const SliceOptions halves{.sizes = {}, .parts = 2, .send_channels = 1};
        std::unique_ptr<GemmOperator> op;
        if (kind == Kind::kGather) {
          op = std::make_unique<AllGatherGemm>(context, small_options(), halves);
        } else if (kind == Kind::kScatter) {
          op =
              std::make_unique<GemmReduceScatter>(context, small_options(), OverlapMethod::kTailFree, halves);
        } else {
          op = std::make_unique<AllToAllGemm>(context, small_options(), HeadSlices{{}, halves});
        }
        const bool heads = kind == Kind::kFromHeads;
        const Matrix a = known_matrix_a(rank, kM, heads ? slice_sizes_of_k()[at(rank)] : kK);
        const Matrix b = known_matrix_b(rank, kN, kK);
        Matrix out(op->output_rows(), kN, DType::kFloat32);
        (*op)(operands_of(a, b, out));
      },
      timeout);
}

// Rank 1 has sent half of a slice to rank 2 and stalls: rank 2 lacks the rest, and rank 0 all of its slice.
TEST(SlicedFailures, StallBetweenTwoSlicesNamesTheSlice) {
  for (const Kind kind : {Kind::kGather, Kind::kScatter, Kind::kFromHeads}) {
    int sends = 0;  // of rank 1, by the stream of its sends only
    const auto stall = [&sends, kind](std::int64_t transfer) {
      const bool is_send = kind == Kind::kScatter ? transfer < 4 : transfer % 4 < 2;
      if (is_send && ++sends == 2) std::this_thread::sleep_for(4 * kShort);
    };
    const std::vector<std::string> messages =
        run_with_hooks_on_rank_1(kind, {.before_tile = {}, .before_transfer = stall}, kShort);
    const std::string operation = kind == Kind::kGather    ? "all-gather-gemm"
                                  : kind == Kind::kScatter ? "gemm-reduce-scatter"
                                                           : "all-to-all-gemm";
    for (const std::size_t other : {0U, 2U}) {
      EXPECT_THAT(messages[other], AllOf(HasSubstr("rank 1"), HasSubstr(operation), HasSubstr(", slice ")));
    }
    EXPECT_NE(messages[1], "") << "the rank that stalled must not believe that all went well";
    EXPECT_GE(sends, 2);
  }
}

TEST(SlicedFailures, TileThatThrowsFailsEveryRank) {
  for (const Kind kind : {Kind::kGather, Kind::kScatter, Kind::kFromHeads}) {
    // Of a scatter, the first tile that rank 1 computes, for rank 2: then both others lack what it sends.
    const std::int64_t bad = kind == Kind::kScatter ? 8 : 3;
    const ExecutorHooks hooks{.before_tile =
                                  [bad](std::int64_t tile) {
                                    if (tile == bad) throw std::runtime_error("injected");
                                  },
                              .before_transfer = {}};
    const std::vector<std::string> messages =
        run_with_hooks_on_rank_1(kind, hooks, std::chrono::milliseconds(60'000));
    EXPECT_THAT(messages[1],
                AllOf(HasSubstr(fmt::format("rank 1, tile {} of wave group", bad)), HasSubstr("injected")));
    if (kind == Kind::kScatter) {
      EXPECT_THAT(messages[0], AllOf(HasSubstr("rank 1"), HasSubstr("tile 8"), HasSubstr("injected")));
      EXPECT_THAT(messages[2], AllOf(HasSubstr("rank 1"), HasSubstr("tile 8"), HasSubstr("injected")));
    }
  }
}

TEST(SlicedFailures, RanksThatDisagreeAllSaySo) {
  const std::vector<std::string> messages = messages_of(
      [](std::shared_ptr<Communicator> communicator) {
        Context context(communicator, ContextOptions{.num_threads = 1});
        SliceOptions slices{.sizes = {16, 16, 16}};
        if (communicator->rank() == 2) slices.sizes = {8, 16, 24};
        const AllGatherGemm op(context, small_options(), slices);
      },
      std::chrono::milliseconds(60'000));
  for (const std::string& message : messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("ranks disagree"), HasSubstr("slices of 16,16,16"),
                               HasSubstr("rank 2 has all-gather-gemm m=48 n=32 k=16"),
                               HasSubstr("slices of 8,16,24")));
  }
}

TEST(SlicedFailures, OptionsThatDoNotHoldFailEveryRank) {
  const auto with_slices_on_rank_1 = [](const SliceOptions& slices, const BaselineOptions& baseline) {
    return messages_of(
        [&](std::shared_ptr<Communicator> communicator) {
          Context context(communicator, ContextOptions{.num_threads = 1});
          const bool other = communicator->rank() == 1;
          const GemmReduceScatter op(context, small_options(), OverlapMethod::kTailFree,
                                     other ? slices : SliceOptions{}, other ? baseline : BaselineOptions{});
        },
        std::chrono::milliseconds(60'000));
  };
  const std::tuple<SliceOptions, BaselineOptions, std::string> cases[] = {
      {{.sizes = {48}}, {}, "rank 1: there are 1 slice sizes (48); expected one for each of 3 ranks"},
      {{.sizes = {48, 1, -1}}, {}, "rank 1: slice 2 has size -1; it must be at least 0"},
      {{.sizes = {}, .parts = -1}, {}, "rank 1: parts of a slice are -1"},
      {{}, {.num_slices = -2}, "rank 1: num_slices is -2; it must be at least 1, or 0"}};
  for (const auto& [slices, baseline, expected] : cases) {
    for (const std::string& message : with_slices_on_rank_1(slices, baseline)) {
      EXPECT_THAT(message, HasSubstr(expected));
    }
  }
}

TEST(SlicedFailures, OperandsOfGathersMustBeDenseAndApart) {
  const auto message = [](const std::function<void(Operands&, Matrix&)>& change) {
    std::string text;
    run_ranks(2, {}, [&](std::shared_ptr<Communicator> communicator) {
      Context context(communicator, ContextOptions{.num_threads = 1});
      AllGatherGemm op(context, {.m = 8, .n = 4, .k = 4});
      const Matrix a = known_matrix_a(0, 8, 4);
      Matrix room = known_matrix_b(0, 16, 8);
      Matrix out(8, 4, DType::kFloat32);
      Operands operands = operands_of(a, room, out);
      operands.ldb = 4;
      if (communicator->rank() == 0) change(operands, room);
      try {
        op(operands);
      } catch (const Error& error) {
        if (communicator->rank() == 0) text = error.what();
      }
    });
    return text;
  };
  EXPECT_THAT(message([](Operands& o, Matrix&) { o.lda = 5; }),
              HasSubstr("lda is 5; parts of a arrive from other ranks, so it must be dense: 4"));
  EXPECT_THAT(message([](Operands& o, Matrix& room) { o.a = room.data(), o.b = room.data() + 16; }),
              AllOf(HasSubstr("a [8, 4] at"), HasSubstr("overlaps b [4, 4]"), HasSubstr("must lie apart")));
  // B is only read, and may be strided.
  EXPECT_EQ(message([](Operands& o, Matrix&) { o.ldb = 8; }), "");
}

TEST(SlicedFailures, HeadsThatDoNotHoldFailEveryRank) {
  const auto with_heads_on_rank_1 = [](const HeadSlices& heads) {
    return messages_of(
        [&](std::shared_ptr<Communicator> communicator) {
          Context context(communicator, ContextOptions{.num_threads = 1});
          const AllToAllGemm op(context, small_options(), communicator->rank() == 1 ? heads : HeadSlices{});
        },
        std::chrono::milliseconds(60'000));
  };
  const std::pair<HeadSlices, std::string> cases[] = {
      {{{.sizes = {24, 24}}, {}},
       "rank 1: there are 2 slice sizes (24,24); expected one for each of 3 ranks"},
      {{{}, {.sizes = {8, 4, 2}}}, "rank 1: slice sizes 8,4,2 sum to 14; expected 16"},
      {{{}, {.sizes = {}, .parts = -3}}, "rank 1: parts of a slice are -3"},
      {{{}, {.sizes = {6, 6, 4}}}, "columns: slices of 6,6,4"}};
  for (const auto& [heads, expected] : cases) {
    for (const std::string& message : with_heads_on_rank_1(heads)) {
      EXPECT_THAT(message, AllOf(HasSubstr(expected), HasSubstr("all-to-all-gemm m=48 n=32 k=16")));
    }
  }
}

TEST(SlicedFailures, WhatTravelsToOtherRanksMustBeDense) {
  std::string text;
  run_ranks(2, {}, [&](std::shared_ptr<Communicator> communicator) {
    Context context(communicator, ContextOptions{.num_threads = 1});
    AllToAllGemm op(context, {.m = 8, .n = 4, .k = 4});
    const Matrix a = known_matrix_a(0, 8, 4);
    const Matrix b = known_matrix_b(0, 4, 4);
    Matrix out(4, 4, DType::kFloat32);
    Operands operands = operands_of(a, b, out);
    operands.lda = communicator->rank() == 0 ? 4 : 2;
    try {
      op(operands);
    } catch (const Error& error) {
      if (communicator->rank() == 0) text = error.what();
    }
  });
  EXPECT_THAT(text, HasSubstr("lda is 4; parts of a go to other ranks, so it must be dense: 2"));
}

// Each tile takes this rank's columns before any waits for others': rank 1 sends only after rank 0 has begun
// all of its tiles, on one thread.
TEST(SlicedFailures, NoTileOfAMainLoopInPassesWaitsWhileAnotherHasWork) {
  std::atomic<int> begun{0};
  const std::vector<std::string> messages = messages_of(
      [&](std::shared_ptr<Communicator> communicator) {
        const int rank = communicator->rank();
        ContextOptions options{.num_threads = 1, .poison_workspace = true};
        if (rank == 0) options.hooks.before_tile = [&](std::int64_t) { ++begun; };
        if (rank == 1) {
          options.hooks.before_transfer = [&](std::int64_t) {
            while (begun.load() < 4) std::this_thread::yield();
          };
        }
        Context context(communicator, options);
        AllToAllGemm op(context, small_options());
        ASSERT_EQ(op.plan().grid.num_tiles(), 4);
        const Matrix a = known_matrix_a(rank, kM, op.num_columns());
        const Matrix b = known_matrix_b(0, kN, kK);
        Matrix out(op.output_rows(), kN, DType::kFloat32);
        op(operands_of(a, b, out));
      },
      std::chrono::milliseconds(60'000));
  for (const std::string& message : messages) EXPECT_EQ(message, "");
}

TEST(SlicedFailures, SlicedBaselineHasToBeAskedFor) {
  const auto communicators = make_in_process_communicators(1);
  Context context(communicators[0], ContextOptions{.num_threads = 1});
  const AllGatherGemm op(context, {.m = 8, .n = 4, .k = 4});
  EXPECT_EQ(message_of(ErrorKind::kBadArgument, [&] { static_cast<void>(op.plan(Method::kSliced)); }),
            "all-gather-gemm was made without a sliced baseline; expected num_slices >= 1");
}

}  // namespace
}  // namespace flashoverlap::test

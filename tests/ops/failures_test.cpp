// What a call that goes wrong leaves behind: the same kind of error on every rank, naming who and what, and
// nothing written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/fail.h"
#include "support/known_faults.h"
#include "support/ops_call.h"

namespace flashoverlap::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kM = 64;
constexpr std::int64_t kN = 48;
constexpr std::int64_t kK = 16;

GemmOptions small_options() {
  return {.m = kM, .n = kN, .k = kK, .tile_m = 16, .tile_n = 16, .partition = {4, 4, 4}};
}

/// What each rank threw; ranks that did not throw have an empty message.
struct Outcome {
  std::vector<std::string> messages;
  std::vector<ErrorKind> kinds;
};

/// Runs `body` on all ranks and catches each rank's own error, before it can reach the other ranks another
/// way.
Outcome outcome_on_ranks(int world_size, const std::function<void(std::shared_ptr<Communicator>)>& body,
                         const InProcessOptions& in_process = {}) {
  Outcome outcome;
  outcome.messages.resize(static_cast<std::size_t>(world_size));
  outcome.kinds.resize(static_cast<std::size_t>(world_size), ErrorKind::kInternal);
  run_ranks(world_size, in_process, [&](std::shared_ptr<Communicator> communicator) {
    const auto rank = static_cast<std::size_t>(communicator->rank());
    try {
      body(communicator);
    } catch (const Error& error) {
      outcome.messages[rank] = error.what();
      outcome.kinds[rank] = error.kind();
    }
  });
  return outcome;
}

/// One all-reduce on a context with `options`; afterwards the context is dead.
void all_reduce_once(const std::shared_ptr<Communicator>& communicator, const ContextOptions& options) {
  Context context(communicator, options);
  GemmAllReduce op(context, small_options());
  const Matrix a = known_matrix_a(communicator->rank(), kM, kK);
  const Matrix b = known_matrix_b(communicator->rank(), kN, kK);
  Matrix out(kM, kN, DType::kFloat32);
  try {
    op(operands_of(a, b, out));
  } catch (const Error&) {
    EXPECT_THROW(op(operands_of(a, b, out)), Error) << "the context should be dead";
    throw;
  }
}

Outcome fail_on_rank_1(const ExecutorHooks& hooks, std::chrono::milliseconds timeout) {
  InProcessOptions in_process;
  in_process.timeout = timeout;
  return outcome_on_ranks(
      3,
      [&](std::shared_ptr<Communicator> communicator) {
        ContextOptions options;
        options.num_threads = 1;
        if (communicator->rank() == 1) options.hooks = hooks;
        all_reduce_once(communicator, options);
      },
      in_process);
}

constexpr std::chrono::milliseconds kLong{60'000};
constexpr std::chrono::milliseconds kShort{400};

TEST(Failures, TileThatThrowsFailsEveryRank) {
  const auto throw_in_tile_5 = [](std::int64_t tile) {
    if (tile == 5) throw std::runtime_error("injected");
  };
  const Outcome outcome = fail_on_rank_1({.before_tile = throw_in_tile_5}, kLong);
  EXPECT_EQ(outcome.messages[1],
            "rank 1, tile 5 of wave group 1 of gemm-all-reduce m=64 n=48 k=16 f32: injected");
  EXPECT_EQ(outcome.kinds[1], ErrorKind::kInternal);
  for (const std::size_t other : {0U, 2U}) {
    EXPECT_EQ(outcome.kinds[other], ErrorKind::kCommunication);
    EXPECT_THAT(outcome.messages[other],
                AllOf(HasSubstr("rank 1"), HasSubstr("tile 5 of wave group 1"), HasSubstr("injected")));
  }
}

TEST(Failures, TransferThatThrowsFailsEveryRank) {
  const auto throw_in_transfer_2 = [](std::int64_t transfer) {
    if (transfer == 2) core::fail(ErrorKind::kDevice, "injected");
  };
  const Outcome outcome = fail_on_rank_1({.before_transfer = throw_in_transfer_2}, kLong);
  EXPECT_EQ(
      outcome.messages[1],
      "rank 1, transfer 2 (all-reduce of wave group 2) of gemm-all-reduce m=64 n=48 k=16 f32: injected");
  EXPECT_EQ(outcome.kinds[1], ErrorKind::kDevice);
  for (const std::size_t other : {0U, 2U}) {
    EXPECT_EQ(outcome.kinds[other], ErrorKind::kCommunication);
    EXPECT_THAT(outcome.messages[other],
                AllOf(HasSubstr("rank 1"), HasSubstr("transfer 2"), HasSubstr("injected")));
  }
}

TEST(Failures, StalledTileOrTransferBecomesATimeOutOnEveryRank) {
  const auto stall = [](std::int64_t index) {
    if (index == 1) std::this_thread::sleep_for(3 * kShort);
  };
  for (const ExecutorHooks& hooks :
       {ExecutorHooks{.before_tile = stall}, ExecutorHooks{.before_transfer = stall}}) {
    const bool in_tile = static_cast<bool>(hooks.before_tile);
    const Outcome outcome = fail_on_rank_1(hooks, kShort);
    const std::string waits_for = in_tile ? "group 0" : "group 1";
    for (const std::size_t other : {0U, 2U}) {
      EXPECT_THAT(outcome.messages[other],
                  AllOf(HasSubstr("rank 1"), HasSubstr(waits_for), HasSubstr("transfer")));
    }
    EXPECT_NE(outcome.messages[1], "") << "the rank that stalled must not believe that all went well";
  }
}

TEST(Failures, OptionThatDoesNotHoldOnOneRankFailsEveryRank) {
  const auto construct = [](const std::shared_ptr<Communicator>& communicator, const GemmOptions& options) {
    Context context(communicator, ContextOptions{.num_threads = 1});
    const GemmAllReduce op(context, options);
  };
  const Outcome outcome = outcome_on_ranks(3, [&](std::shared_ptr<Communicator> communicator) {
    GemmOptions options = small_options();
    if (communicator->rank() == 1) options.tile_m = -4;
    construct(communicator, options);
  });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(outcome.kinds[rank], ErrorKind::kBadArgument);
    EXPECT_THAT(outcome.messages[rank], AllOf(HasSubstr("rank 1: "), HasSubstr("tile_m"), HasSubstr("-4")));
  }
}

TEST(Failures, RanksThatDisagreeAllSaySo) {
  const auto with_difference_on_rank_2 = [](const std::function<void(GemmOptions&)>& change) {
    return outcome_on_ranks(3, [&](std::shared_ptr<Communicator> communicator) {
      Context context(communicator, ContextOptions{.num_threads = 1});
      GemmOptions options = small_options();
      if (communicator->rank() == 2) change(options);
      const GemmAllReduce op(context, options);
    });
  };
  const std::pair<std::function<void(GemmOptions&)>, std::string> cases[] = {
      {[](GemmOptions& o) { o.n = 47; }, "rank 2 has gemm-all-reduce m=64 n=47 k=16 f32"},
      {[](GemmOptions& o) { o.dtype = DType::kFloat16; }, "rank 2 has gemm-all-reduce m=64 n=48 k=16 f16"},
      {[](GemmOptions& o) { o.tile_n = 24, o.partition = {}; }, "tile 16x24"},
      {[](GemmOptions& o) { o.swizzle = 3; }, "swizzle 3"},
      {[](GemmOptions& o) {
         o.partition = {6, 6};
       },
       "partition 6,6"}};
  for (const auto& [change, expected] : cases) {
    const Outcome outcome = with_difference_on_rank_2(change);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(outcome.kinds[rank], ErrorKind::kBadArgument);
      EXPECT_THAT(outcome.messages[rank],
                  AllOf(HasSubstr("ranks disagree: rank 0 has gemm-all-reduce m=64 n=48 k=16 f32"),
                        HasSubstr(expected)));
    }
  }
}

// It may have got through the constructor that the others are still in: what it says knows of no operator.
TEST(Failures, RankThatAbortsIsNamedWithTheOperatorThatOthersConstruct) {
  const Outcome outcome = outcome_on_ranks(3, [&](std::shared_ptr<Communicator> communicator) {
    Context context(communicator, ContextOptions{.num_threads = 1});
    if (communicator->rank() == 1) return communicator->abort("std::bad_alloc");
    const GemmAllReduce op(context, small_options());
  });
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    EXPECT_EQ(outcome.kinds[rank], ErrorKind::kCommunication);
    EXPECT_EQ(outcome.messages[rank],
              fmt::format("rank {}, gemm-all-reduce m=64 n=48 k=16: rank 1 aborted: std::bad_alloc", rank));
  }
}

TEST(Failures, RanksThatMakeDifferentOperatorsAllSaySo) {
  const Outcome outcome = outcome_on_ranks(2, [&](std::shared_ptr<Communicator> communicator) {
    Context context(communicator, ContextOptions{.num_threads = 1});
    if (communicator->rank() == 0) {
      const GemmAllReduce op(context, small_options());
    } else {
      const GemmReduceScatter op(context, small_options());
    }
  });
  for (const std::string& message : outcome.messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("gemm-all-reduce"), HasSubstr("gemm-reduce-scatter")));
  }
}

TEST(Failures, RoutingThatDoesNotHoldFailsEveryRank) {
  const auto route = [](const std::vector<std::int32_t>& on_rank_1) {
    return outcome_on_ranks(2, [&](std::shared_ptr<Communicator> communicator) {
      Context context(communicator, ContextOptions{.num_threads = 1});
      GemmOptions options{.m = 3, .n = 4, .k = 5};
      const std::vector<std::int32_t> here =
          communicator->rank() == 1 ? on_rank_1 : std::vector<std::int32_t>{0, 1, 0};
      const GemmAllToAll op(context, options, here);
    });
  };
  const std::pair<std::vector<std::int32_t>, std::string> cases[] = {
      {{0, 1}, "rank 1: m is 3, but there are 2 destinations"},
      {{0, 2, 1}, "rank 1: destination of row 1 is rank 2; it must be in [0, 2)"},
      {{-1, 0, 1}, "rank 1: destination of row 0 is rank -1; it must be in [0, 2)"}};
  for (const auto& [destinations, expected] : cases) {
    for (const std::string& message : route(destinations).messages) EXPECT_THAT(message, HasSubstr(expected));
  }
}

TEST(Failures, WorkspaceLimitFailsEveryRankAndTheContextLives) {
  const Outcome outcome = outcome_on_ranks(2, [&](std::shared_ptr<Communicator> communicator) {
    // Rank 1 alone is short of memory.
    const std::int64_t limit = communicator->rank() == 1 ? 64 << 20 : 0;
    Context context(communicator, {.num_threads = 1, .workspace_limit_bytes = limit});
    try {
      const GemmAllReduce too_large(context, {.m = 4096, .n = 8192, .k = 8});
      ADD_FAILURE() << "128 MiB fit into 64";
    } catch (const Error& error) {
      EXPECT_LE(context.workspace_bytes(), communicator->rank() == 1 ? 0 : 256 << 20);
      const GemmAllReduce op(context, small_options());
      GemmAllReduce next(context, {.m = 16, .n = 16, .k = 16});
      const Matrix a = known_matrix_a(communicator->rank(), 16, 16);
      const Matrix b = known_matrix_b(communicator->rank(), 16, 16);
      Matrix out(16, 16, DType::kFloat32);
      next(operands_of(a, b, out));
      EXPECT_TRUE(out.guards_intact());
      throw;
    }
  });
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(outcome.kinds[rank], ErrorKind::kOutOfMemory);
    EXPECT_THAT(outcome.messages[rank],
                AllOf(HasSubstr("rank 1: gemm-all-reduce m=4096 n=8192 k=8 f32 needs"),
                      HasSubstr("134217728 packed"), HasSubstr("makes 67108864 available")));
  }
}

TEST(Failures, BadOperandOnOneRankFailsEveryRank) {
  const Outcome outcome = outcome_on_ranks(2, [&](std::shared_ptr<Communicator> communicator) {
    Context context(communicator, ContextOptions{.num_threads = 1});
    GemmAllReduce op(context, small_options());
    const Matrix a = known_matrix_a(0, kM, kK);
    const Matrix b = known_matrix_b(0, kN, kK);
    Matrix out(kM, kN, DType::kFloat32);
    Operands operands = operands_of(a, b, out);
    if (communicator->rank() == 1) operands.b = nullptr;
    try {
      op(operands);
    } catch (const Error&) {
      if (communicator->rank() == 1) {
        EXPECT_TRUE(out.untouched());
      }
      throw;
    }
  });
  EXPECT_EQ(outcome.kinds[1], ErrorKind::kBadArgument);
  EXPECT_THAT(outcome.messages[1], HasSubstr("b is null; a [48, 16] matrix is expected"));
  EXPECT_EQ(outcome.kinds[0], ErrorKind::kCommunication);
  EXPECT_THAT(outcome.messages[0], AllOf(HasSubstr("rank 1"), HasSubstr("b is null")));
}

TEST(Failures, ContextOptions) {
  EXPECT_THAT([] { Context context(nullptr); },
              ::testing::ThrowsMessage<Error>(HasSubstr("communicator is null")));
  const auto communicators = make_in_process_communicators(1);
  EXPECT_THAT([&] { Context context(communicators[0], ContextOptions{.num_threads = -1}); },
              ::testing::ThrowsMessage<Error>(HasSubstr("num_threads is -1; it must be at least 1")));
  EXPECT_THAT([&] { Context context(communicators[0], {.num_threads = 1, .workspace_limit_bytes = -5}); },
              ::testing::ThrowsMessage<Error>(HasSubstr("workspace_limit_bytes is -5")));
}

}  // namespace
}  // namespace flashoverlap::test

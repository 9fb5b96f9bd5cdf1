// Operands::other_work: what compute threads do rather than wait.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/ops_call.h"
#include "support/seed.h"
#include "support/wait_until.h"

namespace flashoverlap::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Ranks with hooks of their own; `body` may fail with an Error, which is returned, by rank.
std::vector<std::string> run_with_hooks(const std::vector<ExecutorHooks>& hooks, int threads,
                                        const std::function<void(Context&, int)>& body) {
  std::vector<std::string> errors(hooks.size());
  run_ranks(static_cast<int>(hooks.size()), {}, [&](const std::shared_ptr<Communicator>& communicator) {
    const auto rank = static_cast<std::size_t>(communicator->rank());
    ContextOptions options{.num_threads = threads};
    options.poison_workspace = true;
    options.hooks = hooks[rank];
    Context context(communicator, options);
    try {
      body(context, communicator->rank());
    } catch (const Error& error) {
      errors[rank] = error.what();
    }
  });
  return errors;
}

const std::vector<std::string> kNoErrors = {"", ""};

GemmOptions eight_tiles() {
  return {.m = 16, .n = 12, .k = 8, .tile_m = 4, .tile_n = 6};
}

/// Of eight_tiles.
struct Call {
  Matrix a;
  Matrix b;
  Matrix out;
  Call(const GemmOperator& op, int rank)
      : a(16, 8, DType::kFloat32), b(12, 8, DType::kFloat32), out(op.output_rows(), 12, DType::kFloat32) {
    a.fill([&](std::int64_t i, std::int64_t p) { return (3 * i + 2 * p + rank) % 7 - 3; });
    b.fill([](std::int64_t j, std::int64_t p) { return (5 * j + p) % 5 - 2; });
  }
  Operands operands() { return operands_of(a, b, out); }
};

class OtherWork : public SeededTest {};

TEST_F(OtherWork, LeavesResultsAloneAndIsAskedInRunsOnly) {
  for (int round = 0; round < 8; ++round) {
    const GemmOptions options{
        .m = pick(1, 60), .n = pick(1, 40), .k = pick(1, 20), .tile_m = pick(2, 16), .tile_n = pick(3, 16)};
    const bool gathers = round % 2 == 0;
    const std::int64_t pieces = pick(0, 20);
    on_ranks(
        static_cast<int>(pick(1, 4)),
        [&](Context& context, int rank) {
          std::unique_ptr<GemmOperator> op;
          if (gathers) {
            op = std::make_unique<AllGatherGemm>(context, options);
          } else {
            op = std::make_unique<GemmReduceScatter>(context, options, OverlapMethod::kTailFree);
          }
          // An all-gather's A has this rank's rows filled in; the others arrive.
          Matrix a(options.m, options.k, DType::kFloat32);
          a.fill([&](std::int64_t i, std::int64_t p) { return (i + 2 * p + (gathers ? 0 : rank)) % 5 - 2; });
          Matrix b(options.n, options.k, DType::kFloat32);
          b.fill([](std::int64_t j, std::int64_t p) { return (3 * j + p) % 7 - 3; });
          Matrix expected(op->output_rows(), options.n, DType::kFloat32);
          (*op)(operands_of(a, b, expected));
          std::atomic<std::int64_t> asked{0};
          Matrix out(op->output_rows(), options.n, DType::kFloat32);
          Operands operands = operands_of(a, b, out);
          operands.other_work = [&](const SliceArrived&) { return asked++ < pieces; };
          (*op)(operands);
          EXPECT_TRUE(out == expected);
          asked = 0;
          for (const Mode mode : {Mode::kGemmOnly, Mode::kPlainGemm, Mode::kCommunicationOnly}) {
            op->run(operands, Method::kOverlap, mode, nullptr);
          }
          EXPECT_EQ(asked, 0);
        },
        {.num_threads = static_cast<int>(pick(1, 3))});
  }
}

// Rank 1 sends nothing before rank 0 has done three pieces, which it can only while it waits for the slice.
TEST(OtherWorkWhile, ATileWaitsForASlice) {
  std::atomic<int> pieces{0};
  std::vector<ExecutorHooks> hooks(2);
  hooks[1].before_transfer = [&](std::int64_t) { wait_until([&] { return pieces >= 3; }); };
  Timeline timeline;
  const auto errors = run_with_hooks(hooks, 1, [&](Context& context, int rank) {
    AllGatherGemm op(context, eight_tiles());
    Call call(op, rank);
    Operands operands = call.operands();
    if (rank == 0) {
      operands.other_work = [&](const SliceArrived& has_arrived) {
        EXPECT_TRUE(!has_arrived(0) || pieces >= 3);
        ++pieces;
        return true;
      };
    }
    op.run(operands, Method::kOverlap, Mode::kRun, rank == 0 ? &timeline : nullptr);
  });
  EXPECT_EQ(errors, kNoErrors);
  EXPECT_EQ(std::ranges::count(timeline.spans, SpanKind::kOther, &Span::kind), pieces);
}

// The same while nothing is left to compute, but transfers are not done.
TEST(OtherWorkWhile, TransfersAreUnderWayAfterTheLastTile) {
  for (const int threads : {1, 2}) {
    std::atomic<int> tiles{0};
    std::atomic<int> pieces{0};
    std::vector<ExecutorHooks> hooks(2);
    hooks[0].before_tile = [&](std::int64_t) { ++tiles; };
    hooks[1].before_transfer = [&](std::int64_t) { wait_until([&] { return pieces >= 3; }); };
    const auto errors = run_with_hooks(hooks, threads, [&](Context& context, int rank) {
      GemmAllReduce op(context, eight_tiles());
      Call call(op, rank);
      Operands operands = call.operands();
      if (rank == 0) {
        operands.other_work = [&](const SliceArrived&) {
          // All have been taken, but each of the other threads may only be about to start its own.
          EXPECT_GE(tiles, 8 - (threads - 1)) << "no tile has anything to wait for";
          ++pieces;
          return true;
        };
      }
      op(operands);
    });
    EXPECT_EQ(errors, kNoErrors);
  }
}

TEST(OtherWorkWhile, NothingIsLeftItWaits) {
  std::atomic<int> asked{0};
  std::int64_t waits = 0;
  std::vector<ExecutorHooks> hooks(2);
  hooks[1].before_transfer = [&](std::int64_t) { wait_until([&] { return asked >= 1; }); };
  const auto errors = run_with_hooks(hooks, 1, [&](Context& context, int rank) {
    AllGatherGemm op(context, eight_tiles());
    Call call(op, rank);
    Operands operands = call.operands();
    if (rank == 0) {
      operands.other_work = [&](const SliceArrived&) {
        ++asked;
        return false;
      };
      waits = std::ssize(op.plan().gates);
    }
    op(operands);
  });
  EXPECT_EQ(errors, kNoErrors);
  EXPECT_LE(asked, waits + 1) << "once for each wait and at the end, never again while it waits";
}

/// What both ranks say when rank 0's work throws. Rank 1 sends nothing before that call has ended: it could
/// be done with its own before it hears of the error.
std::vector<std::string> errors_of_work(bool gathers, const std::function<void(const SliceArrived&)>& work) {
  std::atomic<bool> failed{false};
  std::vector<ExecutorHooks> hooks(2);
  hooks[1].before_transfer = [&](std::int64_t) { wait_until([&] { return failed.load(); }); };
  return run_with_hooks(hooks, 2, [&](Context& context, int rank) {
    std::unique_ptr<GemmOperator> op;
    if (gathers) {
      op = std::make_unique<AllGatherGemm>(context, eight_tiles());
    } else {
      op = std::make_unique<GemmAllReduce>(context, eight_tiles());
    }
    Call call(*op, rank);
    Operands operands = call.operands();
    if (rank == 0) {
      operands.other_work = [&](const SliceArrived& has_arrived) {
        work(has_arrived);
        return true;
      };
    }
    try {
      (*op)(operands);
    } catch (const Error&) {
      failed = true;
      throw;
    }
  });
}

TEST(OtherWorkFailures, AreErrorsOnEveryRank) {
  for (const bool gathers : {true, false}) {
    const auto errors =
        errors_of_work(gathers, [](const SliceArrived&) { throw std::runtime_error("no gradient today"); });
    for (const std::string& error : errors) {
      EXPECT_THAT(error, AllOf(HasSubstr(gathers ? "rank 0, tile" : "rank 0, after the tiles of"),
                               HasSubstr("other work: no gradient today")));
    }
  }
}

TEST(OtherWorkFailures, ASliceThatThePlanHasNot) {
  for (const std::int64_t slice : {std::int64_t{-1}, std::int64_t{5}}) {
    const auto errors = errors_of_work(false, [&](const SliceArrived& has_arrived) { has_arrived(slice); });
    EXPECT_THAT(errors[0], HasSubstr("slice " + std::to_string(slice) + " is asked for; the plan has 0"));
  }
}

}  // namespace
}  // namespace flashoverlap::test

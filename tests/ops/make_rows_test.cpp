// Operands::make_rows: A is made while the call runs, in the order in which the schedule comes to its rows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "flashoverlap/cpu_executor.h"
#include "plan/row_runs.h"
#include "support/ops_call.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

enum class Kind { kAllReduce, kSignal, kBlockCyclic, kTailFree, kShardedWeight, kHeads };
constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kSignal,        Kind::kBlockCyclic,
                           Kind::kTailFree,  Kind::kShardedWeight, Kind::kHeads};

std::unique_ptr<GemmOperator> make_op(Context& context, Kind kind, const GemmOptions& options) {
  switch (kind) {
    case Kind::kAllReduce:
      return std::make_unique<GemmAllReduce>(context, options);
    case Kind::kSignal:
      return std::make_unique<GemmReduceScatter>(context, options);
    case Kind::kBlockCyclic:
      return std::make_unique<GemmReduceScatter>(context, options, RowOwnership::kBlockCyclic);
    case Kind::kTailFree:
      return std::make_unique<GemmReduceScatter>(context, options, OverlapMethod::kTailFree);
    case Kind::kShardedWeight:
      return std::make_unique<ShardedWeightGemm>(context, options);
    case Kind::kHeads:
      return std::make_unique<GemmAllToAll>(context, options, HeadSlices{});
  }
  return nullptr;
}

/// A whose rows are made by the call, each counted.
struct Made {
  Made(const Matrix& complete)
      : whole(complete),
        a(complete.rows(), complete.cols(), complete.dtype(), complete.ld()),
        times(static_cast<std::size_t>(complete.rows())) {}

  RowProducer producer() {
    return [this](std::int64_t first, std::int64_t count) {
      for (std::int64_t i = first; i < first + count; ++i) {
        ++times[static_cast<std::size_t>(i)];
        for (std::int64_t p = 0; p < whole.cols(); ++p) a.set(i, p, whole.at(i, p));
      }
    };
  }
  [[nodiscard]] bool each_once() const {
    return std::ranges::all_of(times, [](const std::atomic<int>& count) { return count.load() == 1; });
  }

  const Matrix& whole;
  Matrix a;
  std::vector<std::atomic<int>> times;
};

/// B of a rank; of a sharded weight its own rows alone.
Matrix weight_of(Kind kind, const GemmOperator& op, int rank, std::int64_t n, std::int64_t k) {
  Matrix b(n, k, DType::kFloat32);
  const auto* sharded = dynamic_cast<const ShardedWeightGemm*>(&op);
  b.fill([&](std::int64_t i, std::int64_t p) {
    const std::int64_t own = kind == Kind::kShardedWeight || kind == Kind::kHeads ? 0 : rank;
    return (7 * own + 3 * i + 5 * p) % 11 - 5;
  });
  if (sharded == nullptr) return b;
  Matrix own(n, k, DType::kFloat32);
  for (std::int64_t i = sharded->first_row(); i < sharded->first_row() + sharded->num_rows(); ++i) {
    for (std::int64_t p = 0; p < k; ++p) own.set(i, p, b.at(i, p));
  }
  return own;
}

class MakeRows : public SeededTest {};

TEST_F(MakeRows, GivesTheBitsOfACompleteA) {
  for (int i = 0; i < 12; ++i) {
    const Kind kind = kKinds[static_cast<std::size_t>(i) % std::size(kKinds)];
    const int world_size = static_cast<int>(pick(1, 4));
    const GemmOptions options{.m = pick(0, 70),
                              .n = pick(1, 50),
                              .k = pick(1, 20),
                              .tile_m = pick(3, 20),
                              .tile_n = pick(5, 20),
                              .swizzle = pick(1, 3)};
    const int threads = static_cast<int>(pick(1, 3));
    on_ranks(world_size,
             [&](Context& context, int rank) {
               SCOPED_TRACE(testing::Message()
                            << "kind " << static_cast<int>(kind) << " world " << world_size << " m "
                            << options.m << " n " << options.n << " threads " << threads);
               const auto op = make_op(context, kind, options);
               const OverlapPlan& plan = op->plan();
               Matrix whole(plan.grid.rows(), options.k, DType::kFloat32, options.k + 3);
               whole.fill([&](std::int64_t r, std::int64_t p) { return (13 * rank + 2 * r + p) % 7 - 3; });
               for (const Method method : {Method::kSerial, Method::kOverlap}) {
                 const Matrix b = weight_of(kind, *op, rank, options.n, options.k);
                 Matrix expected(plan.output_rows, plan.output_cols, DType::kFloat32);
                 (*op)(operands_of(whole, b, expected), method);
                 Made made(whole);
                 Matrix out(plan.output_rows, plan.output_cols, DType::kFloat32);
                 Operands operands = operands_of(made.a, b, out);
                 operands.make_rows = made.producer();
                 (*op)(operands, method);
                 EXPECT_TRUE(out == expected);
                 EXPECT_TRUE(made.each_once());
                 EXPECT_TRUE(made.a == whole);  // guards and padding, too
               }
             },
             {.num_threads = threads});
    if (HasFailure()) return;
  }
}

TEST(MakeRowsOrder, FollowsTheScheduleAndNotTheMatrix) {
  const GemmOptions options{.m = 12, .n = 8, .k = 4, .tile_m = 2, .tile_n = 4};
  on_ranks(3,
           [&](Context& context, int rank) {
             GemmReduceScatter op(context, options, OverlapMethod::kTailFree);
             Matrix a(options.m, options.k, DType::kFloat32);
             a.fill([](auto, auto) { return 1; });
             Matrix out(4, options.n, DType::kFloat32);
             std::vector<std::int64_t> first_rows;
             Matrix weight(options.n, options.k, DType::kFloat32);
             weight.fill([](auto, auto) { return 1; });
             Operands operands = operands_of(a, weight, out);
             operands.make_rows = [&](std::int64_t first, std::int64_t count) {
               EXPECT_EQ(count, 2);
               first_rows.push_back(first);
             };
             for (const Mode mode : {Mode::kRun, Mode::kPlainGemm, Mode::kCommunicationOnly}) {
               first_rows.clear();
               op.run(operands, Method::kOverlap, mode, nullptr);
               if (mode == Mode::kCommunicationOnly) {
                 EXPECT_TRUE(first_rows.empty());
                 continue;
               }
               // Slices of ranks r + 1, r + 2, then the own one.
               const std::int64_t next = 4 * ((rank + 1) % 3);
               const std::int64_t other = 4 * ((rank + 2) % 3);
               const std::int64_t own = 4 * rank;
               EXPECT_THAT(first_rows, ElementsAre(next, next + 2, other, other + 2, own, own + 2));
             }
           },
           {.num_threads = 1});
}

TEST(MakeRowsFailures, AThrowingProducerIsAnErrorOnEveryRank) {
  std::vector<std::string> messages(3);
  on_ranks(3,
           [&](Context& context, int rank) {
             const GemmOptions options{.m = 24, .n = 8, .k = 4, .tile_m = 4, .tile_n = 4};
             GemmReduceScatter op(context, options, OverlapMethod::kTailFree);
             Matrix a(options.m, options.k, DType::kFloat32);
             Matrix b(options.n, options.k, DType::kFloat32);
             Matrix out(8, options.n, DType::kFloat32);
             Operands operands = operands_of(a, b, out);
             // The first rows of rank 1's schedule: it sends in order, so no rank can end without them.
             operands.make_rows = [&](std::int64_t first, std::int64_t) {
               if (rank == 1 && first == 16) throw std::runtime_error("no such query");
             };
             try {
               op(operands);
             } catch (const Error& error) {
               messages[static_cast<std::size_t>(rank)] = error.what();
             }
           },
           {.num_threads = 2});
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    EXPECT_THAT(messages[rank], AllOf(HasSubstr("rank 1"), HasSubstr("no such query"))) << "rank " << rank;
  }
}

TEST(MakeRowsFailures, WhereATravelsItIsRefused) {
  on_ranks(2, [&](Context& context, int) {
    const GemmOptions options{.m = 8, .n = 8, .k = 8};
    AllGatherGemm op(context, options);
    Matrix a(8, 8, DType::kFloat32);
    Matrix b(8, 8, DType::kFloat32);
    Matrix out(8, 8, DType::kFloat32);
    Operands operands = operands_of(a, b, out);
    operands.make_rows = [](auto, auto) {};
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported,
                              "make_rows is given, but a travels between ranks, so it must be complete at",
                              op(operands));
  });
}

/// One that cannot call back.
class OtherExecutor final : public Executor {
 public:
  explicit OtherExecutor(std::unique_ptr<Executor> inner) : inner_(std::move(inner)) {}
  std::unique_ptr<PreparedPlan> prepare(OverlapPlan plan) override {
    return inner_->prepare(std::move(plan));
  }
  void execute(PreparedPlan& plan, const Operands& operands, Mode mode, Timeline* timeline) override {
    inner_->execute(plan, operands, mode, timeline);
  }
  [[nodiscard]] std::int64_t workspace_bytes() const override { return inner_->workspace_bytes(); }

 private:
  std::unique_ptr<Executor> inner_;
};

TEST(MakeRowsFailures, AnExecutorThatCannotIsNotAsked) {
  run_ranks(1, {}, [](const std::shared_ptr<Communicator>& communicator) {
    Context context(communicator, std::make_unique<OtherExecutor>(make_cpu_executor(communicator)));
    GemmAllReduce op(context, {.m = 8, .n = 8, .k = 8});
    Matrix a(8, 8, DType::kFloat32);
    Matrix out(8, 8, DType::kFloat32);
    const Matrix b(8, 8, DType::kFloat32);
    Operands operands = operands_of(a, b, out);
    operands.make_rows = [](auto, auto) { ADD_FAILURE() << "called"; };
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "the executor of gemm-all-reduce cannot make rows",
                              op(operands));
    EXPECT_TRUE(out.untouched());
  });
}

OverlapPlan plan_of(const TileGrid& grid) {
  OverlapPlan plan;
  plan.grid = grid;
  for (std::int64_t tile = 0; tile < grid.num_tiles(); ++tile) plan.schedule.push_back(tile);
  return plan;
}

TEST(RowRuns, TilesSideBySideReadTheSameRows) {
  const Problem left{.row_begin = 0, .rows = 10, .cols = 7};
  const Problem right{.row_begin = 0, .rows = 10, .col_begin = 7, .cols = 5};
  const plan::RowRuns runs(plan_of(TileGrid({left, right}, 3, 4, 4)));
  ASSERT_EQ(runs.size(), 3);
  EXPECT_EQ(runs.at(2).first, 8);
  EXPECT_EQ(runs.at(2).count, 2);
  EXPECT_EQ(plan::RowRuns(plan_of(TileGrid({left}, 3, 4, 4))).of_tile(5), 2);
}

TEST(RowRuns, RowsInCommonInPartAreRefused) {
  const Problem left{.row_begin = 0, .rows = 10, .cols = 7};
  const auto with = [&](std::int64_t row_begin, std::int64_t rows) {
    const Problem right{.row_begin = row_begin, .rows = rows, .col_begin = 7, .cols = 5};
    return plan::RowRuns(plan_of(TileGrid({left, right}, 3, 4, 4)));
  };
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "some tiles read rows up to 4, others from 2 on",
                            static_cast<void>(with(2, 8)));
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "tiles from row 8 on have 2 and 3 rows",
                            static_cast<void>(with(0, 11)));
}

}  // namespace
}  // namespace flashoverlap::test

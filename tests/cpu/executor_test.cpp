// The CPU executor on small hand-made plans: every part of a plan on its own.
#include "flashoverlap/cpu_executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <set>
#include <stdexcept>
#include <thread>

#include "cpu/hand_made_plans.h"
#include "flashoverlap/in_process.h"
#include "support/known_faults.h"
#include "support/ops_call.h"

namespace flashoverlap::test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

void delay_some(std::int64_t index) {
  if (index % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

void on_executors(std::int32_t world_size, const std::function<void(Executor&, std::int32_t)>& body) {
  run_ranks(world_size, {}, [&](std::shared_ptr<Communicator> communicator) {
    const auto executor = make_cpu_executor(
        communicator, {.num_threads = 2,
                       .poison_workspace = true,
                       .hooks = {.before_tile = delay_some, .before_transfer = delay_some}});
    body(*executor, communicator->rank());
  });
}

/// Integers, so that sums are exact. A of rank r holds known_a(r, …).
float product_at(std::int64_t a_seed, std::int64_t row, std::int64_t b_seed, std::int64_t col,
                 std::int64_t k) {
  std::int64_t sum = 0;
  for (std::int64_t p = 0; p < k; ++p) sum += known_a(a_seed, row, p) * known_b(b_seed, p, col);
  return static_cast<float>(sum);
}

TEST(CpuExecutor, StartGatesHoldTilesUntilTheirRowsHaveArrived) {
  for (const std::int32_t world_size : {2, 3, 5}) {
    on_executors(world_size, [&](Executor& executor, std::int32_t rank) {
      const HandMadeShape shape{.rank = rank, .world_size = world_size};
      const auto prepared = executor.prepare(gather_rows_plan(shape));
      const std::int64_t rows = shape.rows_per_rank;
      for (int call = 0; call < 20; ++call) {
        Matrix a(world_size * rows, shape.k, DType::kFloat32);  // NaN where nothing has arrived
        for (std::int64_t i = rank * rows; i < (rank + 1) * rows; ++i) {
          for (std::int64_t p = 0; p < shape.k; ++p) a.set(i, p, static_cast<float>(known_a(call, i, p)));
        }
        const Matrix b = known_matrix_b(rank, shape.n, shape.k);
        Matrix out(world_size * rows, shape.n, DType::kFloat32);
        executor.execute(*prepared, operands_of(a, b, out), Mode::kRun, nullptr);
        for (std::int64_t i = 0; i < out.rows(); ++i) {
          for (std::int64_t j = 0; j < shape.n; ++j)
            ASSERT_EQ(out.at(i, j), product_at(call, i, rank, j, shape.k));
        }
        EXPECT_TRUE(out.guards_intact());
      }
    });
  }
}

TEST(CpuExecutor, StartGateInsideTheMainLoop) {
  on_executors(2, [](Executor& executor, std::int32_t rank) {
    const HandMadeShape shape{.rank = rank, .world_size = 2, .rows_per_rank = 1, .n = 10, .k = 8};
    OverlapPlan plan = plain_plan(shape, {{.rows = 1, .cols = shape.n}});
    const Region halves[] = {{BufferKind::kInput, 0, 4}, {BufferKind::kInput, 4, 4}};
    Transfer send;
    send.kind = TransferKind::kSend;
    send.peer = 1 - rank;
    send.source = halves[rank];
    Transfer receive;
    receive.kind = TransferKind::kReceive;
    receive.channel = 1;
    receive.peer = 1 - rank;
    receive.destination = halves[1 - rank];
    receive.slice = 0;
    plan.transfers = {send, receive};
    plan.slices = {{1 - rank, halves[1 - rank]}};
    for (std::int64_t tile = 0; tile < plan.grid.num_tiles(); ++tile) {
      plan.schedule.push_back(tile);
      plan.gates.push_back({tile, 0, GatePoint::kStart, rank == 0 ? 4 : 0, 0});
    }
    plan.groups = {{0, plan.grid.num_tiles()}};
    const auto prepared = executor.prepare(plan);
    Matrix a(1, shape.k, DType::kFloat32);
    for (std::int64_t p = rank * 4; p < rank * 4 + 4; ++p) a.set(0, p, static_cast<float>(known_a(0, 0, p)));
    const Matrix b = known_matrix_b(0, shape.n, shape.k);
    Matrix out(1, shape.n, DType::kFloat32);
    executor.execute(*prepared, operands_of(a, b, out), Mode::kRun, nullptr);
    for (std::int64_t j = 0; j < shape.n; ++j) EXPECT_EQ(out.at(0, j), product_at(0, 0, 0, j, shape.k));
  });
}

// One rank waits for columns of A in the middle of the main loop, for every type, also where
// tiles have several segments.
TEST(CpuExecutor, PartialSumsAreKeptBetweenPasses) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool summed : {false, true}) {
      on_executors(2, [&](Executor& executor, std::int32_t rank) {
        const HandMadeShape shape{.rank = rank, .world_size = 2, .rows_per_rank = 9, .n = 10, .k = 8};
        const auto prepared = executor.prepare(column_passes_plan(shape, dtype, summed));
        for (std::int64_t call = 0; call < 5; ++call) {
          Matrix a(9, 2, dtype);
          a.fill([&](std::int64_t i, std::int64_t p) { return known_a(call, i, 2 * rank + p); });
          const Matrix b = known_matrix_b(call, shape.n, 4, dtype);
          Matrix out(9, shape.n, dtype);
          executor.execute(*prepared, operands_of(a, b, out), Mode::kRun, nullptr);
          for (std::int64_t i = 0; i < 9; ++i) {
            for (std::int64_t j = 0; j < shape.n; ++j)
              ASSERT_EQ(out.at(i, j), (summed ? 2 : 1) * product_at(call, i, call, j, 4))
                  << "row " << i << " column " << j;
          }
          EXPECT_TRUE(out.guards_intact());
        }
      });
    }
  }
}

TEST(CpuExecutor, FinishGatesAddWhatHasArrived) {
  for (const std::int32_t world_size : {2, 3, 5}) {
    on_executors(world_size, [&](Executor& executor, std::int32_t rank) {
      const HandMadeShape shape{.rank = rank, .world_size = world_size};
      const auto prepared = executor.prepare(scatter_rows_plan(shape));
      const std::int64_t rows = shape.rows_per_rank;
      for (int call = 0; call < 20; ++call) {
        const Matrix a = known_matrix_a(rank + call, world_size * rows, shape.k);
        const Matrix b = known_matrix_b(rank + call, shape.n, shape.k);
        Matrix out(rows, shape.n, DType::kFloat32, shape.n + 3);
        executor.execute(*prepared, operands_of(a, b, out), Mode::kRun, nullptr);
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < shape.n; ++j) {
            float expected = 0;
            for (std::int32_t r = 0; r < world_size; ++r) {
              expected += product_at(r + call, rank * rows + i, r + call, j, shape.k);
            }
            ASSERT_EQ(out.at(i, j), expected) << "row " << i << " column " << j;
          }
        }
        EXPECT_TRUE(out.guards_intact());
      }
    });
  }
}

// Rank 1 fails before it has sent: tiles of the other ranks wait for what will never come, and must be told.
TEST(CpuExecutor, FailureReachesTilesThatWaitForASlice) {
  for (const bool finish_gates : {false, true}) {
    run_ranks(3, {}, [&](std::shared_ptr<Communicator> communicator) {
      const std::int32_t rank = communicator->rank();
      ExecutorHooks hooks;
      if (rank == 1) {
        hooks.before_transfer = [](std::int64_t) { throw std::runtime_error("injected"); };
      }
      const auto executor = make_cpu_executor(communicator, {.num_threads = 2, .hooks = hooks});
      const HandMadeShape shape{.rank = rank, .world_size = 3};
      const auto prepared =
          executor->prepare(finish_gates ? scatter_rows_plan(shape) : gather_rows_plan(shape));
      const Matrix b = known_matrix_b(rank, shape.n, shape.k);
      Matrix a(3 * shape.rows_per_rank, shape.k, DType::kFloat32);
      Matrix out(3 * shape.rows_per_rank, shape.n, DType::kFloat32);
      EXPECT_THAT([&] { executor->execute(*prepared, operands_of(a, b, out), Mode::kRun, nullptr); },
                  ThrowsMessage<Error>(::testing::AllOf(HasSubstr("rank 1"), HasSubstr("injected"))))
          << "rank " << rank;
    });
  }
}

TEST(CpuExecutor, ProblemsTakeTheirOwnWeight) {
  on_executors(1, [](Executor& executor, std::int32_t) {
    const HandMadeShape shape;
    const std::vector<std::int64_t> rows = {5, 0, 7, 1};
    const std::vector<std::int64_t> weights = {2, 1, 0, 2};
    const auto prepared = executor.prepare(experts_plan(shape, rows, weights));
    const Matrix a = known_matrix_a(0, 13, shape.k);
    Matrix stack(3 * shape.n, shape.k, DType::kFloat32, shape.k + 2);
    stack.fill([&](std::int64_t i, std::int64_t p) { return known_b(i / shape.n, p, i % shape.n); });
    Matrix out(13, shape.n, DType::kFloat32);
    executor.execute(*prepared, operands_of(a, stack, out), Mode::kRun, nullptr);
    std::int64_t row = 0;
    for (std::size_t problem = 0; problem < rows.size(); ++problem) {
      for (std::int64_t end = row + rows[problem]; row < end; ++row) {
        for (std::int64_t j = 0; j < shape.n; ++j) {
          ASSERT_EQ(out.at(row, j), product_at(0, row, weights[problem], j, shape.k)) << "row " << row;
        }
      }
    }
  });
}

PlanOptions three_groups_of_15_tiles(std::int32_t rank) {
  return {.rank = rank,
          .world_size = 2,
          .m = 20,
          .n = 12,
          .k = 5,
          .tile_m = 4,
          .tile_n = 4,
          .resources = {.compute_units = 2, .communication_units = 0},
          .partition = {3, 3, 2}};
}

TEST(CpuExecutor, PartsOfARunWriteWhatTheySay) {
  on_executors(2, [](Executor& executor, std::int32_t rank) {
    const auto prepared = executor.prepare(plan_all_reduce(three_groups_of_15_tiles(rank)));
    const Matrix a = known_matrix_a(rank, 20, 5);
    const Matrix b = known_matrix_b(rank, 12, 5);
    Matrix out(20, 12, DType::kFloat32);
    executor.execute(*prepared, operands_of(a, b, out), Mode::kGemmOnly, nullptr);
    EXPECT_TRUE(out.untouched()) << "tiles go to the packed buffer, and nothing restores them";
    executor.execute(*prepared, operands_of(a, b, out), Mode::kCommunicationOnly, nullptr);
    EXPECT_TRUE(out.untouched());
    executor.execute(*prepared, operands_of(a, b, out), Mode::kPlainGemm, nullptr);
    for (std::int64_t i = 0; i < 20; ++i) {
      for (std::int64_t j = 0; j < 12; ++j) ASSERT_EQ(out.at(i, j), product_at(rank, i, rank, j, 5));
    }
    EXPECT_TRUE(out.guards_intact());
  });
}

TEST(CpuExecutor, TimelineHasEveryTileAndTransferOnce) {
  on_executors(2, [](Executor& executor, std::int32_t rank) {
    const auto prepared = executor.prepare(plan_all_reduce(three_groups_of_15_tiles(rank)));
    const Matrix a = known_matrix_a(rank, 20, 5);
    const Matrix b = known_matrix_b(rank, 12, 5);
    Matrix out(20, 12, DType::kFloat32);
    Timeline timeline;
    executor.execute(*prepared, operands_of(a, b, out), Mode::kRun, &timeline);
    std::multiset<std::string> names;
    for (const Span& span : timeline.spans) {
      EXPECT_EQ(span.rank, rank);
      EXPECT_LE(span.begin_us, span.end_us);
      EXPECT_GT(span.begin_us, 0);
      if (span.kind == SpanKind::kCompute || span.kind == SpanKind::kCommunication) names.insert(span.name);
    }
    std::multiset<std::string> expected = {"transfer 0", "transfer 1", "transfer 2"};
    for (int tile = 0; tile < 15; ++tile) expected.insert("tile " + std::to_string(tile));
    EXPECT_EQ(names, expected);
  });
}

TEST(CpuExecutor, RefusesPlansThatItCannotCarryOut) {
  on_executors(1, [](Executor& executor, std::int32_t) {
    PlanOptions options;
    options.m = options.n = options.k = 8;
    options.tile_m = options.tile_n = 4;
    OverlapPlan plan = plan_all_reduce(options);
    plan.schedule[1] = plan.schedule[0];
    EXPECT_THAT(
        [&] { auto p = executor.prepare(plan); },
        ThrowsMessage<Error>(HasSubstr("plan of gemm-all-reduce does not hold: tile 0 is scheduled twice")));
    options.rank = 1;
    options.world_size = 2;
    plan = plan_all_reduce(options);
    EXPECT_THAT([&] { auto p = executor.prepare(plan); },
                ThrowsMessage<Error>(HasSubstr("is for rank 1 of 2; this executor is rank 0 of 1")));
  });
}

TEST(CpuExecutor, OptionsOutOfRange) {
  const auto communicator = make_in_process_communicators(1)[0];
  EXPECT_THAT([&] { auto e = make_cpu_executor(communicator, {.num_threads = 0}); },
              ThrowsMessage<Error>(HasSubstr("num_threads is 0; it must be at least 1")));
  EXPECT_THAT([&] { auto e = make_cpu_executor(nullptr); },
              ThrowsMessage<Error>(HasSubstr("communicator is null")));
}

}  // namespace
}  // namespace flashoverlap::test

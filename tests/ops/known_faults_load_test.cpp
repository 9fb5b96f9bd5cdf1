// Known faults that show only after many calls, with changing shapes, or with more threads than cores.
#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "support/known_faults.h"
#include "support/ops_call.h"
#include "support/seed.h"

namespace flashoverlap::test {
namespace {

// ThreadSanitizer watches every access of every call, so fewer calls show as much.
#if defined(__SANITIZE_THREAD__)
constexpr int kManyCalls = 200;
constexpr std::size_t kShapeCalls = 12;
constexpr int kReuseRounds = 5;
#elif defined(__SANITIZE_ADDRESS__)
constexpr int kManyCalls = 2000;
constexpr std::size_t kShapeCalls = 60;
constexpr int kReuseRounds = 20;
#else
constexpr int kManyCalls = 10'000;  // for 2 ranks and for 4
constexpr std::size_t kShapeCalls = 200;
constexpr int kReuseRounds = 200;
#endif

class KnownFaultsUnderLoad : public SeededTest {};

GemmOptions options_of(std::int64_t m, std::int64_t n, std::int64_t k,
                       std::vector<std::int64_t> partition = {}) {
  GemmOptions options;
  options.m = m;
  options.n = n;
  options.k = k;
  options.partition = std::move(partition);
  return options;
}

void sleep_up_to_a_millisecond(std::mt19937& rng) {
  std::this_thread::sleep_for(std::chrono::microseconds(rng() % 1000));
}

TEST_F(KnownFaultsUnderLoad, B09ShapesChangeInOneContext) {
  struct Call {
    std::int64_t m;
    std::int64_t n;
    CheckSums sums;
  };
  const std::vector<Call> shapes = {
      {1024, 256, {-19, -5177}}, {16, 256, {-180, -18349}}, {384, 1032, {-288, -25025}}};
  const std::vector<std::size_t> order = {0, 1, 2, 1, 0, 2};
  constexpr std::int64_t kDepth = 32;
  on_ranks(4, [&](Context& context, int rank) {
    std::mt19937 rng(static_cast<std::uint32_t>(seed()) + static_cast<std::uint32_t>(rank));
    std::vector<std::unique_ptr<GemmAllReduce>> ops;
    for (const Call& call : shapes)
      ops.push_back(std::make_unique<GemmAllReduce>(context, options_of(call.m, call.n, kDepth)));
    for (std::size_t i = 0; i < kShapeCalls; ++i) {
      const std::size_t index = order[i % order.size()];
      const Call& call = shapes[index];
      const Matrix a = known_matrix_a(rank, call.m, kDepth);
      const Matrix b = known_matrix_b(rank, call.n, kDepth);
      Matrix out(call.m, call.n, DType::kFloat32);
      sleep_up_to_a_millisecond(rng);
      (*ops[index])(operands_of(a, b, out));
      // All of the outputs take long to read: whole ones for the small shape, the corners' rows for the
      // others.
      if (call.m == 16 || i % 20 < 3) {
        ASSERT_EQ(check_sums(out), call.sums) << "call " << i;
      }
    }
  });
}

TEST_F(KnownFaultsUnderLoad, B09OperatorsMixInOneContext) {
  constexpr std::int64_t kRows = 96;
  constexpr std::int64_t kCols = 136;
  constexpr std::int64_t kDepth = 32;
  on_ranks(4, [&](Context& context, int rank) {
    std::mt19937 rng(static_cast<std::uint32_t>(seed()) + static_cast<std::uint32_t>(rank));
    GemmOptions options = options_of(kRows, kCols, kDepth);
    options.tile_m = options.tile_n = 32;
    std::vector<std::int32_t> destinations;
    for (std::int32_t i = 0; i < kRows; ++i) destinations.push_back(i % 4);
    GemmAllReduce all_reduce(context, options);
    GemmReduceScatter scatter(context, options);
    GemmAllToAll exchange(context, options, destinations);
    const Matrix a = known_matrix_a(rank, kRows, kDepth);
    const Matrix b = known_matrix_b(rank, kCols, kDepth);
    for (int i = 0; i < 30; ++i) {
      Matrix sum(kRows, kCols, DType::kFloat32);
      Matrix piece(kRows / 4, kCols, DType::kFloat32);
      Matrix exchanged(kRows, kCols, DType::kFloat32);
      sleep_up_to_a_millisecond(rng);
      exchange(operands_of(a, b, exchanged));
      sleep_up_to_a_millisecond(rng);
      all_reduce(operands_of(a, b, sum));
      sleep_up_to_a_millisecond(rng);
      scatter(operands_of(a, b, piece));
      for (std::int64_t row = 0; row < kRows / 4; ++row) {
        for (std::int64_t col = 0; col < kCols; ++col) {
          ASSERT_EQ(piece.at(row, col), sum.at(rank * kRows / 4 + row, col));
          float added = 0;  // row 4 row + rank of every rank's product
          for (std::int64_t source = 0; source < 4; ++source)
            added += exchanged.at(source * kRows / 4 + row, col);
          ASSERT_EQ(added, sum.at(4 * row + rank, col));
        }
      }
    }
  });
}

TEST_F(KnownFaultsUnderLoad, B11EveryElementOfManySmallCalls) {
  constexpr std::int64_t kRows = 16;
  constexpr std::int64_t kCols = 128;
  constexpr std::int64_t kDepth = 16;
  for (const int ranks : {2, 4}) {
    // out = base + c * (column sums of all B) when c is added to every element of A.
    std::vector<float> base(kRows * kCols);
    std::vector<float> slope(kCols);
    for (std::int64_t j = 0; j < kCols; ++j) {
      for (std::int64_t r = 0; r < ranks; ++r) {
        for (std::int64_t p = 0; p < kDepth; ++p) {
          const std::int64_t b = known_b(r, p, j);
          slope[static_cast<std::size_t>(j)] += static_cast<float>(b);
          for (std::int64_t i = 0; i < kRows; ++i) {
            base[static_cast<std::size_t>(i * kCols + j)] += static_cast<float>(known_a(r, i, p) * b);
          }
        }
      }
    }
    ContextOptions context_options;
    context_options.num_threads = 1;
    on_ranks(
        ranks,
        [&](Context& context, int rank) {
          GemmOptions options = options_of(kRows, kCols, kDepth, {3, 1});
          options.tile_m = 8;
          options.tile_n = 64;
          GemmAllReduce op(context, options);
          std::vector<Matrix> a(5, known_matrix_a(rank, kRows, kDepth));
          for (int c = 0; c < 5; ++c) {
            a[static_cast<std::size_t>(c)].fill([&](auto i, auto p) { return known_a(rank, i, p) + c; });
          }
          const Matrix b = known_matrix_b(rank, kCols, kDepth);
          Matrix out(kRows, kCols, DType::kFloat32);
          const auto* values = reinterpret_cast<const float*>(out.data());
          for (int call = 0; call < kManyCalls; ++call) {
            const int c = call % 5;
            op(operands_of(a[static_cast<std::size_t>(c)], b, out));
            for (std::size_t i = 0; i < base.size(); ++i) {
              const float expected = base[i] + static_cast<float>(c) * slope[i % slope.size()];
              if (values[i] != expected) FAIL() << "call " << call << " element " << i << ": " << values[i];
            }
          }
        },
        context_options);
  }
}

/// Everything that `body` starts runs on one core.
void on_one_core(const std::function<void()>& body) {
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &all)) continue;
    CPU_SET(cpu, &one);
    break;
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  body();
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
}

TEST_F(KnownFaultsUnderLoad, B37ManyMoreThreadsThanCores) {
  const auto run = [] {
    ContextOptions context_options;
    context_options.num_threads = 4;
    on_ranks(
        8,
        [](Context& context, int rank) {
          GemmOptions options = options_of(256, 256, 64);
          options.tile_m = options.tile_n = 32;
          GemmAllReduce op(context, options);
          const Matrix a = known_matrix_a(rank, 256, 64);
          const Matrix b = known_matrix_b(rank, 256, 64);
          CheckSums first;
          for (int call = 0; call < 50; ++call) {
            Matrix out(256, 256, DType::kFloat32);
            op(operands_of(a, b, out));
            if (call > 0 && call < 49) continue;
            for (const std::int64_t i : {0, 100, 255}) {
              for (std::int64_t j = 0; j < 256; ++j) {
                std::int64_t expected = 0;
                for (std::int64_t r = 0; r < 8; ++r) {
                  for (std::int64_t p = 0; p < 64; ++p) expected += known_a(r, i, p) * known_b(r, p, j);
                }
                ASSERT_EQ(out.at(i, j), static_cast<float>(expected));
              }
            }
          }
        },
        context_options);
  };
  on_one_core(run);
  run();
}

TEST_F(KnownFaultsUnderLoad, B39InputsGoAwayRightAfterTheCall) {
  constexpr std::int64_t kRows = 4096;
  constexpr std::int64_t kCols = 1024;
  constexpr std::int64_t kDepth = 64;
  on_ranks(2, [&](Context& context, int rank) {
    GemmAllReduce op(context, options_of(kRows, kCols, kDepth));
    const Matrix a = known_matrix_a(rank, kRows, kDepth);
    const Matrix b = known_matrix_b(rank, kCols, kDepth);
    CheckSums first;
    for (int round = 0; round < kReuseRounds; ++round) {
      auto a_copy = std::make_unique<Matrix>(a);
      auto b_copy = std::make_unique<Matrix>(b);
      Matrix out(kRows, kCols, DType::kFloat32);
      op(operands_of(*a_copy, *b_copy, out));
      a_copy->poison();
      b_copy->poison();
      a_copy.reset();
      b_copy.reset();
      const Matrix reused(kRows, kDepth, DType::kFloat32);  // likely where A was
      if (round == 0) first = check_sums(out);
      if (round % 10 == 9) {
        ASSERT_EQ(check_sums(out), first) << "round " << round;
      }
    }
    // Two rows against the definition.
    Matrix out(kRows, kCols, DType::kFloat32);
    op(operands_of(a, b, out));
    EXPECT_EQ(check_sums(out), first);
    for (const std::int64_t i : {std::int64_t{0}, kRows - 1}) {
      for (std::int64_t j = 0; j < kCols; ++j) {
        std::int64_t expected = 0;
        for (std::int64_t r = 0; r < 2; ++r) {
          for (std::int64_t p = 0; p < kDepth; ++p) expected += known_a(r, i, p) * known_b(r, p, j);
        }
        ASSERT_EQ(out.at(i, j), static_cast<float>(expected));
      }
    }
  });
}

}  // namespace
}  // namespace flashoverlap::test

// Faults that users of such libraries met (B01, B03, … as in the issue), for the operators whose data travels
// in slices, each with the numbers that are right.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "support/known_faults.h"
#include "support/ops_call.h"

namespace flashoverlap::test {
namespace {

struct Shape {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  int ranks = 1;
};

GemmOptions options_of(const Shape& shape) {
  return {.m = shape.m, .n = shape.n, .k = shape.k};
}

constexpr Method kAll[] = {Method::kOverlap, Method::kSerial, Method::kSliced};

/// Ranks may be processes, so this goes by the communicator.
CheckSums over_all_ranks(Communicator& communicator, const CheckSums& own) {
  std::string bytes(sizeof(own), '\0');
  std::memcpy(bytes.data(), &own, sizeof(own));
  CheckSums total;
  for (const std::string& part : communicator.exchange(bytes, {.operation = "check sums"})) {
    CheckSums sums;
    std::memcpy(&sums, part.data(), sizeof(sums));
    total += sums;
  }
  return total;
}

void expect_reduce_scatter(const Shape& shape, const CheckSums& expected, const SliceOptions& slices) {
  SCOPED_TRACE(::testing::Message() << "m=" << shape.m << " n=" << shape.n << " ranks=" << shape.ranks);
  on_ranks(shape.ranks, [&](Context& context, int rank) {
    GemmReduceScatter op(context, options_of(shape), OverlapMethod::kTailFree, slices, {.num_slices = 2});
    const Matrix a = known_matrix_a(rank, shape.m, shape.k);
    const Matrix b = known_matrix_b(rank, shape.n, shape.k);
    const std::int64_t first_row = slice_begins(slices, shape.m, shape.ranks)[static_cast<std::size_t>(rank)];
    for (const Method method : kAll) {
      Matrix out(op.output_rows(), shape.n, DType::kFloat32);
      op(operands_of(a, b, out), method);
      EXPECT_TRUE(out.guards_intact());
      EXPECT_EQ(over_all_ranks(context.communicator(), check_sums(out, first_row)), expected);
    }
  });
}

TEST(SlicedKnownFaults, B01RaggedLastTile) {
  expect_reduce_scatter({256, 576, 64, 2}, {436, -29161}, {});
  expect_reduce_scatter({256, 576, 64, 4}, {776, -3982}, {});
  expect_reduce_scatter({300, 130, 64, 2}, {157, 6569}, {});
  expect_reduce_scatter({300, 130, 64, 2}, {157, 6569}, {.sizes = {129, 171}, .parts = 3});
}

TEST(SlicedKnownFaults, B03FewerRowsThanATile) {
  expect_reduce_scatter({8, 128, 256, 4}, {73, 5786}, {});
  expect_reduce_scatter({8, 128, 256, 4}, {73, 5786}, {.sizes = {0, 7, 0, 1}, .parts = 2});
  expect_reduce_scatter({1, 128, 256, 4}, {-594, 7}, {});
  expect_reduce_scatter({63, 128, 256, 2}, {211, -27049}, {});
}

/// The gathered A, with rank s's rows made of its seed; only `rank`'s own are set.
Matrix own_rows(const Shape& shape, int rank, std::int64_t seed) {
  const std::int64_t local = shape.m / shape.ranks;
  Matrix a(shape.m, shape.k, DType::kFloat32);
  for (std::int64_t i = 0; i < local; ++i) {
    for (std::int64_t p = 0; p < shape.k; ++p)
      a.set(rank * local + i, p, static_cast<float>(known_a(seed, i, p)));
  }
  return a;
}

/// seeds[s] made rank s's rows.
void expect_gathered(const Matrix& out, const Shape& shape, const std::vector<std::int64_t>& seeds,
                     std::int64_t weight_seed) {
  const std::int64_t local = shape.m / shape.ranks;
  for (std::int64_t i = 0; i < shape.m; ++i) {
    for (std::int64_t j = 0; j < shape.n; ++j) {
      std::int64_t expected = 0;
      for (std::int64_t p = 0; p < shape.k; ++p) {
        expected +=
            known_a(seeds[static_cast<std::size_t>(i / local)], i % local, p) * known_b(weight_seed, p, j);
      }
      ASSERT_EQ(out.at(i, j), static_cast<float>(expected)) << "row " << i << " column " << j;
    }
  }
}

TEST(SlicedKnownFaults, B01AndB03AllGather) {
  for (const Shape& shape : {Shape{256, 130, 24, 2}, Shape{300, 30, 24, 4}, Shape{8, 128, 40, 4}}) {
    on_ranks(shape.ranks, [&](Context& context, int rank) {
      AllGatherGemm op(context, options_of(shape));
      const Matrix b = known_matrix_b(rank, shape.n, shape.k);
      std::vector<std::int64_t> seeds;
      for (int s = 0; s < shape.ranks; ++s) seeds.push_back(s);
      for (const Method method : {Method::kOverlap, Method::kSerial}) {
        const Matrix a = own_rows(shape, rank, rank);
        Matrix out(shape.m, shape.n, DType::kFloat32);
        op(operands_of(a, b, out), method);
        EXPECT_TRUE(a.guards_intact() && out.guards_intact());
        expect_gathered(out, shape, seeds, rank);
      }
    });
  }
}

/// This rank's columns of a whole A made of `seed`.
Matrix own_columns(const Shape& shape, const AllToAllGemm& op, std::int64_t seed) {
  Matrix a(shape.m, op.num_columns(), DType::kFloat32);
  a.fill([&](std::int64_t i, std::int64_t j) { return known_a(seed, i, op.first_column() + j); });
  return a;
}

/// This rank's rows of the product of matrices made of these seeds.
void expect_projected(const Matrix& out, const Shape& shape, std::int64_t first_row, std::int64_t seed) {
  for (std::int64_t i = 0; i < out.rows(); ++i) {
    for (std::int64_t j = 0; j < shape.n; ++j) {
      std::int64_t expected = 0;
      for (std::int64_t p = 0; p < shape.k; ++p) {
        expected += known_a(seed, first_row + i, p) * known_b(seed, p, j);
      }
      ASSERT_EQ(out.at(i, j), static_cast<float>(expected)) << "row " << i << " column " << j;
    }
  }
  EXPECT_TRUE(out.guards_intact());
}

void project(Context& context, const Shape& shape, const HeadSlices& heads,
             const std::vector<std::int64_t>& seeds) {
  AllToAllGemm op(context, options_of(shape), heads);
  for (const std::int64_t seed : seeds) {
    for (const Method method : {Method::kOverlap, Method::kSerial}) {
      const Matrix a = own_columns(shape, op, seed);
      Matrix out(op.output_rows(), shape.n, DType::kFloat32);
      op(operands_of(a, known_matrix_b(seed, shape.n, shape.k), out), method);
      EXPECT_TRUE(a.guards_intact());
      expect_projected(out, shape, op.first_row(), seed);
    }
  }
}

// Ragged last tiles, fewer rows than a tile, defaults on two ranks after eight, a subgroup, calls in a row.
TEST(SlicedKnownFaults, B01B03B05B07AllToAllGemm) {
  const HeadSlices uneven{{.sizes = {0, 7, 0, 1}}, {.sizes = {9, 0, 30, 1}, .parts = 2}};
  for (const Shape& shape : {Shape{256, 130, 24, 2}, Shape{300, 30, 24, 4}, Shape{8, 128, 40, 4},
                             Shape{1, 40, 9, 3}, Shape{96, 20, 16, 8}, Shape{96, 20, 16, 2}}) {
    const bool is_uneven = shape.m == 8;
    on_ranks(shape.ranks, [&](Context& context, int) {
      project(context, shape, is_uneven ? uneven : HeadSlices{}, {3, 13, 23});
    });
  }
  run_ranks(4, {}, [&](std::shared_ptr<Communicator> world) {
    if (world->rank() < 2) return;
    Context context(world->subgroup(std::vector<int>{3, 2}), {.poison_workspace = true});
    project(context, {64, 24, 16, 2}, {}, {5});
  });
}

TEST(SlicedKnownFaults, B05AllDefaultsOnTwoRanksAlsoAfterEight) {
  for (const int ranks : {2, 8, 2}) {
    const Shape shape{64 * ranks, 96, 48, ranks};
    on_ranks(ranks, [&](Context& context, int rank) {
      AllGatherGemm op(context, options_of(shape));
      EXPECT_EQ(op.first_row(), 64 * rank);
      EXPECT_EQ(op.num_rows(), 64);
      const Matrix a = own_rows(shape, rank, rank);
      const Matrix b = known_matrix_b(rank, shape.n, shape.k);
      Matrix out(shape.m, shape.n, DType::kFloat32);
      op(operands_of(a, b, out));
      if (rank == 0) {
        EXPECT_EQ(out.at(0, 0), -30);
        EXPECT_EQ(out.at(64, 0), -27);
        EXPECT_EQ(out.at(127, 95), -22);
      } else if (rank == 1) {
        EXPECT_EQ(out.at(0, 0), 1);
        EXPECT_EQ(out.at(127, 95), 2);
      }
    });
  }
}

TEST(SlicedKnownFaults, B05SubgroupOfGlobalRanks) {
  const Shape shape{64, 64, 64, 2};
  for (const std::vector<int>& members : {std::vector<int>{2, 3}, std::vector<int>{3, 2}}) {
    run_ranks(4, {}, [&](std::shared_ptr<Communicator> world) {
      const int global_rank = world->rank();
      if (global_rank < 2) return;
      Context context(world->subgroup(members), {.poison_workspace = true});
      const int rank = context.communicator().rank();
      GemmReduceScatter scatter(context, options_of(shape), OverlapMethod::kTailFree);
      const Matrix a = known_matrix_a(global_rank, shape.m, shape.k);
      const Matrix b = known_matrix_b(global_rank, shape.n, shape.k);
      Matrix piece(32, shape.n, DType::kFloat32);
      scatter(operands_of(a, b, piece));
      // Pieces follow the order in which the ranks were listed.
      EXPECT_EQ(rank == 0 ? piece.at(0, 0) : piece.at(31, 63), rank == 0 ? -52 : 71);

      AllGatherGemm gather(context, options_of(shape));
      const Matrix own = own_rows(shape, rank, global_rank);
      Matrix out(shape.m, shape.n, DType::kFloat32);
      gather(operands_of(own, b, out));
      expect_gathered(out, shape, {members[0], members[1]}, global_rank);
    });
  }
}

TEST(SlicedKnownFaults, B07NothingToResetBetweenCalls) {
  const Shape shape{512, 256, 128, 2};
  const CheckSums sums[] = {{-551, 8491}, {230, -14175}, {-120, -5408}};
  const std::vector<float> corners_of_call[] = {{-39, 78, 8, -3}, {69, -29, -66, -81}, {-51, 42, -22, 22}};
  const Shape gathered{128, 96, 48, 2};
  on_ranks(2, [&](Context& context, int rank) {
    GemmReduceScatter scatter(context, options_of(shape), OverlapMethod::kTailFree);
    AllGatherGemm gather(context, options_of(gathered));
    GemmAllToAll heads(context, options_of(gathered), HeadSlices{});
    for (std::int64_t call = 0; call < 3; ++call) {
      const auto delay = [&] {
        if (rank == 1 && call > 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      };
      const std::int64_t seed = rank + 10 * call;
      delay();
      Matrix piece(256, shape.n, DType::kFloat32);
      scatter(
          operands_of(known_matrix_a(seed, shape.m, shape.k), known_matrix_b(seed, shape.n, shape.k), piece));
      EXPECT_EQ(over_all_ranks(context.communicator(), check_sums(piece, 256 * rank)), sums[call])
          << "call " << call;
      const std::vector<float> ends = corners(piece);
      const auto row = static_cast<std::size_t>(2 * rank);
      EXPECT_EQ(ends[row], corners_of_call[call][row]) << "call " << call;
      EXPECT_EQ(ends[row + 1], corners_of_call[call][row + 1]) << "call " << call;

      delay();
      const Matrix own = own_rows(gathered, rank, seed);
      const Matrix b = known_matrix_b(seed, gathered.n, gathered.k);
      Matrix out(gathered.m, gathered.n, DType::kFloat32);
      gather(operands_of(own, b, out));
      expect_gathered(out, gathered, {10 * call, 10 * call + 1}, seed);

      delay();
      // Both ranks' 64 tokens, this rank's 48 columns, of one weight.
      const Matrix tokens = known_matrix_a(seed, 64, gathered.k);
      const Matrix weight = known_matrix_b(call, gathered.n, gathered.k);
      Matrix columns(gathered.m, 48, DType::kFloat32);
      heads(operands_of(tokens, weight, columns));
      for (std::int64_t i = 0; i < gathered.m; ++i) {
        for (std::int64_t j = 0; j < 48; ++j) {
          std::int64_t expected = 0;
          for (std::int64_t p = 0; p < gathered.k; ++p)
            expected += known_a(10 * call + i / 64, i % 64, p) * known_b(call, p, 48 * rank + j);
          ASSERT_EQ(columns.at(i, j), static_cast<float>(expected)) << "call " << call << " row " << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace flashoverlap::test

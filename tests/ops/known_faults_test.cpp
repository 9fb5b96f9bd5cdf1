// Faults that users of such libraries met (B01, B03, … as in the issue), each with the numbers that are
// right.
#include "support/known_faults.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "support/ops_call.h"

namespace flashoverlap::test {
namespace {

struct Shape {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  int ranks = 1;
};

/// C of rank `rank`, with the data seed of rank r being r + seed.
Matrix all_reduce(Context& context, GemmAllReduce& op, const Shape& shape, std::int64_t seed, Method method) {
  const std::int64_t rank_seed = context.communicator().rank() + seed;
  const Matrix a = known_matrix_a(rank_seed, shape.m, shape.k);
  const Matrix b = known_matrix_b(rank_seed, shape.n, shape.k);
  Matrix out(shape.m, shape.n, DType::kFloat32);
  op(operands_of(a, b, out), method);
  EXPECT_TRUE(out.guards_intact());
  return out;
}

GemmOptions options_of(const Shape& shape) {
  return {.m = shape.m, .n = shape.n, .k = shape.k};
}

constexpr Method kBoth[] = {Method::kOverlap, Method::kSerial};

void expect_all_reduce(const Shape& shape, const CheckSums& expected,
                       const std::vector<float>& expected_corners = {}) {
  SCOPED_TRACE(::testing::Message() << "all-reduce m=" << shape.m << " n=" << shape.n
                                    << " ranks=" << shape.ranks);
  on_ranks(shape.ranks, [&](Context& context, int) {
    GemmAllReduce op(context, options_of(shape));
    for (const Method method : kBoth) {
      const Matrix out = all_reduce(context, op, shape, 0, method);
      EXPECT_EQ(check_sums(out), expected);
      if (!expected_corners.empty()) {
        EXPECT_EQ(corners(out), expected_corners);
      }
    }
  });
}

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

void expect_reduce_scatter(const Shape& shape, const CheckSums& expected, RowOwnership rows) {
  SCOPED_TRACE(::testing::Message() << "reduce-scatter m=" << shape.m << " n=" << shape.n
                                    << " ranks=" << shape.ranks);
  for (const Method method : kBoth) {
    on_ranks(shape.ranks, [&](Context& context, int rank) {
      GemmReduceScatter op(context, options_of(shape), rows);
      const Matrix a = known_matrix_a(rank, shape.m, shape.k);
      const Matrix b = known_matrix_b(rank, shape.n, shape.k);
      Matrix out(op.output_rows(), shape.n, DType::kFloat32);
      op(operands_of(a, b, out), method);
      EXPECT_TRUE(out.guards_intact());
      const std::vector<std::int64_t> owned =
          owned_rows(shape.m, op.plan().grid.tile_m(), shape.ranks, rank, rows);
      CheckSums own;
      for (std::int64_t i = 0; i < out.rows(); ++i) {
        Matrix row(1, shape.n, DType::kFloat32);
        row.fill([&](std::int64_t, std::int64_t j) { return out.at(i, j); });
        own += check_sums(row, owned[static_cast<std::size_t>(i)]);
      }
      EXPECT_EQ(over_all_ranks(context.communicator(), own), expected);
    });
  }
}

TEST(KnownFaults, B01RaggedLastTile) {
  const struct {
    Shape shape;
    CheckSums sums;
    std::vector<float> corners;
  } cases[] = {{{256, 576, 64, 2}, {436, -29161}, {-55, 47, 71, -35}},
               {{256, 576, 64, 4}, {776, -3982}, {-107, 85, 85, -66}},
               {{300, 130, 64, 2}, {157, 6569}, {-55, 27, -11, 27}}};
  for (const auto& c : cases) {
    expect_all_reduce(c.shape, c.sums, c.corners);
    expect_reduce_scatter(c.shape, c.sums, RowOwnership::kContiguous);
    expect_reduce_scatter(c.shape, c.sums, RowOwnership::kBlockCyclic);
  }
}

TEST(KnownFaults, B03FewerRowsThanATile) {
  const struct {
    std::int64_t m;
    CheckSums two_ranks;
    CheckSums four_ranks;
  } cases[] = {{1, {-670, -2076}, {-594, 7}},
               {8, {-123, -5669}, {73, 5786}},
               {16, {-385, -38632}, {-67, -32377}},
               {32, {-647, -37256}, {-1087, -58009}},
               {63, {211, -27049}, {-627, -69616}}};
  for (const auto& c : cases) {
    expect_all_reduce({c.m, 128, 256, 2}, c.two_ranks);
    expect_all_reduce({c.m, 128, 256, 4}, c.four_ranks);
  }
  expect_reduce_scatter({8, 128, 256, 4}, {73, 5786}, RowOwnership::kContiguous);
}

TEST(KnownFaults, B05EightRanksThenTwoInOneProcess) {
  const Shape shape{64, 64, 64, 8};
  std::vector<double> sums;
  for (const int ranks : {8, 2}) {
    on_ranks(ranks, [&](Context& context, int) {
      GemmAllReduce op(context, options_of(shape));
      const Matrix out = all_reduce(context, op, shape, 0, Method::kOverlap);
      for (std::int64_t i = 0; i < shape.m; ++i) {
        for (std::int64_t j = 0; j < shape.n; ++j) {
          std::int64_t expected = 0;
          for (int r = 0; r < ranks; ++r) {
            for (std::int64_t p = 0; p < shape.k; ++p) expected += known_a(r, i, p) * known_b(r, p, j);
          }
          ASSERT_EQ(out.at(i, j), static_cast<float>(expected)) << "row " << i << " column " << j;
        }
      }
    });
  }
}

TEST(KnownFaults, B05SubgroupOfGlobalRanks) {
  const Shape shape{64, 64, 64, 2};
  for (const std::vector<int>& members : {std::vector<int>{2, 3}, std::vector<int>{3, 2}}) {
    run_ranks(4, {}, [&](std::shared_ptr<Communicator> world) {
      const int global_rank = world->rank();
      if (global_rank < 2) return;
      Context context(world->subgroup(members), {.poison_workspace = true});
      const Matrix a = known_matrix_a(global_rank, shape.m, shape.k);
      const Matrix b = known_matrix_b(global_rank, shape.n, shape.k);

      GemmAllReduce all_reduce_op(context, options_of(shape));
      Matrix sum(shape.m, shape.n, DType::kFloat32);
      all_reduce_op(operands_of(a, b, sum));
      EXPECT_EQ(sum.at(0, 0), -52);
      EXPECT_EQ(sum.at(63, 63), 71);

      GemmReduceScatter scatter_op(context, options_of(shape));
      Matrix piece(32, shape.n, DType::kFloat32);
      scatter_op(operands_of(a, b, piece));
      // Pieces follow the order in which the ranks were listed.
      const bool first = members[0] == global_rank;
      EXPECT_EQ(first ? piece.at(0, 0) : piece.at(31, 63), first ? -52 : 71);
    });
  }
}

TEST(KnownFaults, B07NothingToResetBetweenCalls) {
  const Shape shape{512, 256, 128, 2};
  const struct {
    CheckSums sums;
    std::vector<float> corners;
  } calls[] = {{{-551, 8491}, {-39, 78, 8, -3}},
               {{230, -14175}, {69, -29, -66, -81}},
               {{-120, -5408}, {-51, 42, -22, 22}}};
  on_ranks(2, [&](Context& context, int rank) {
    GemmAllReduce all_reduce_op(context, options_of(shape));
    GemmReduceScatter scatter_op(context, options_of(shape));
    // Row i goes to rank i mod 2, and comes back to its place below.
    std::vector<std::int32_t> destinations;
    for (std::int32_t i = 0; i < 512; ++i) destinations.push_back(i % 2);
    GemmAllToAll exchange_op(context, options_of(shape), destinations);
    for (int call = 0; call < 3; ++call) {
      if (rank == 1 && call > 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const Matrix out = all_reduce(context, all_reduce_op, shape, 10 * call, Method::kOverlap);
      EXPECT_EQ(check_sums(out), calls[call].sums) << "call " << call;
      EXPECT_EQ(corners(out), calls[call].corners) << "call " << call;

      const Matrix a = known_matrix_a(rank + 10 * call, shape.m, shape.k);
      const Matrix b = known_matrix_b(rank + 10 * call, shape.n, shape.k);
      Matrix piece(256, shape.n, DType::kFloat32);
      if (rank == 1 && call > 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      scatter_op(operands_of(a, b, piece));
      Matrix exchanged(512, shape.n, DType::kFloat32);
      if (rank == 1 && call > 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      exchange_op(operands_of(a, b, exchanged));
      for (std::int64_t i = 0; i < 256; ++i) {
        for (std::int64_t j = 0; j < shape.n; ++j) {
          ASSERT_EQ(piece.at(i, j), out.at(rank * 256 + i, j)) << "call " << call;
          // Row 2 i + rank of both ranks' partial products came here: their sum is that row of the result.
          ASSERT_EQ(exchanged.at(i, j) + exchanged.at(256 + i, j), out.at(2 * i + rank, j))
              << "call " << call;
        }
      }
    }
  });
}

TEST(KnownFaults, B15NothingToSend) {
  const struct {
    int ranks;
    std::vector<std::vector<std::int64_t>> rows;  // rows[source][destination]
  } cases[] = {{2, {{64, 64}, {0, 0}}}, {2, {{0, 0}, {0, 0}}}, {3, {{0, 5, 0}, {0, 0, 0}, {7, 0, 0}}}};
  // First and last element of what each rank gets, where it gets something.
  const std::vector<std::vector<std::vector<float>>> expected = {
      {{-47, 12}, {-33, -5}}, {{}, {}}, {{6, -55}, {-47, 16}, {}}};
  for (std::size_t index = 0; index < expected.size(); ++index) {
    const auto& c = cases[index];
    on_ranks(c.ranks, [&](Context& context, int rank) {
      std::vector<std::int32_t> destinations;
      for (int to = 0; to < c.ranks; ++to) {
        const auto rows =
            static_cast<std::size_t>(c.rows[static_cast<std::size_t>(rank)][static_cast<std::size_t>(to)]);
        destinations.insert(destinations.end(), rows, to);
      }
      const Shape shape{std::ssize(destinations), 128, 64, c.ranks};
      GemmAllToAll op(context, options_of(shape), destinations);
      std::int64_t received = 0;
      for (int from = 0; from < c.ranks; ++from) {
        const std::int64_t rows = c.rows[static_cast<std::size_t>(from)][static_cast<std::size_t>(rank)];
        EXPECT_EQ(op.rows_from()[static_cast<std::size_t>(from)], rows);
        received += rows;
      }
      ASSERT_EQ(op.output_rows(), received);
      const Matrix a = known_matrix_a(rank, shape.m, shape.k);
      const Matrix b = known_matrix_b(rank, shape.n, shape.k);
      for (const Method method : kBoth) {
        Matrix out(received, shape.n, DType::kFloat32);
        op(operands_of(a, b, out), method);
        EXPECT_TRUE(out.guards_intact());
        const std::vector<float>& ends = expected[index][static_cast<std::size_t>(rank)];
        if (ends.empty()) continue;
        EXPECT_EQ(out.at(0, 0), ends[0]);
        EXPECT_EQ(out.at(received - 1, 127), ends[1]);
      }
    });
  }
}

TEST(KnownFaults, B31EpilogueOnceAfterTheSum) {
  const Shape shape{40, 24, 8, 0};
  for (int ranks = 1; ranks <= 4; ++ranks) {
    on_ranks(ranks, [&](Context& context, int rank) {
      Matrix a(shape.m, shape.k, DType::kFloat32);
      Matrix b(shape.n, shape.k, DType::kFloat32);
      Matrix bias(1, shape.n, DType::kFloat32);
      a.fill([](auto, auto) { return 0; });
      b.fill([](auto, auto) { return 0; });
      bias.fill([](auto, auto) { return 1; });
      GemmOptions options = options_of(shape);
      options.tile_m = options.tile_n = 8;
      GemmAllReduce all_reduce_op(context, options);
      GemmReduceScatter scatter_op(context, options);
      for (const Method method : kBoth) {
        for (GemmOperator* op :
             {static_cast<GemmOperator*>(&all_reduce_op), static_cast<GemmOperator*>(&scatter_op)}) {
          Matrix out(op->output_rows(), shape.n, DType::kFloat32);
          Operands operands = operands_of(a, b, out);
          operands.epilogue.bias = bias.data();
          (*op)(operands, method);
          for (std::int64_t i = 0; i < out.rows(); ++i) {
            for (std::int64_t j = 0; j < out.cols(); ++j) ASSERT_EQ(out.at(i, j), 1) << "ranks " << ranks;
          }
        }
      }
      if (ranks != 2) return;
      // Partial results -3 and +5: ReLU of each would give 5.
      a.fill([](auto, std::int64_t p) { return p == 0 ? 1 : 0; });
      b.fill([&](auto, auto) { return rank == 0 ? -3 : 5; });
      Matrix out(shape.m, shape.n, DType::kFloat32);
      Operands operands = operands_of(a, b, out);
      operands.epilogue.activation = Activation::kRelu;
      all_reduce_op(operands);
      EXPECT_EQ(check_sums(out).sum, 2.0 * static_cast<double>(shape.m * shape.n));
    });
  }
}

}  // namespace
}  // namespace flashoverlap::test

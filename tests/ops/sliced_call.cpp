#include "ops/sliced_call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "support/ops_call.h"

namespace flashoverlap::test {
namespace {

// Multiply-adds of the reference per rank: it is plain code, and runs under sanitizers too.
constexpr std::int64_t kReferenceBudget = 100'000;

std::int64_t pick(std::mt19937_64& rng, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
}

std::int64_t pick_size(std::mt19937_64& rng, std::int64_t largest) {
  return pick(rng, 0, 7) == 0 ? pick(rng, 0, 3) : pick(rng, 1, largest);
}

Matrix random_matrix(std::mt19937_64& rng, std::int64_t rows, std::int64_t cols, DType dtype) {
  Matrix matrix(rows, cols, dtype);
  std::uniform_real_distribution<float> uniform(-1, 1);
  matrix.fill([&](auto, auto) { return uniform(rng); });
  return matrix;
}

SliceOptions random_slices(std::mt19937_64& rng, std::int64_t size, int world_size) {
  SliceOptions slices{.sizes = {}, .parts = pick(rng, 0, 4), .send_channels = pick(rng, 0, 3)};
  if (pick(rng, 0, 2) == 0) return slices;
  std::vector<std::int64_t> cuts{0, size};
  for (int i = 1; i < world_size; ++i) cuts.push_back(pick(rng, 0, size));
  std::ranges::sort(cuts);
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) slices.sizes.push_back(cuts[i + 1] - cuts[i]);
  return slices;
}

bool reduces(const SlicedCall& call) {
  return call.kind == SlicedKind::kReduceScatter || call.kind == SlicedKind::kGradient;
}

std::vector<std::int64_t> begins_of(const SlicedCall& call) {
  const bool columns = call.kind == SlicedKind::kShardedWeight;
  return slice_begins(call.slices, columns ? call.options.n : call.options.m, call.world_size);
}

void make_inputs(std::mt19937_64& rng, SlicedCall& call) {
  const GemmOptions& o = call.options;
  const Matrix a = random_matrix(rng, o.m, o.k, o.dtype);
  const Matrix b = random_matrix(rng, o.n, o.k, o.dtype);
  const auto rows = slice_begins(call.heads.rows, o.m, call.world_size);
  for (int rank = 0; rank < call.world_size; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::int64_t own_rows = call.kind == SlicedKind::kHeads ? rows[r + 1] - rows[r] : o.m;
    const bool same_a = call.kind == SlicedKind::kAllGather || call.kind == SlicedKind::kFromHeads;
    const bool same_b = call.kind == SlicedKind::kShardedWeight || call.kind == SlicedKind::kHeads;
    call.inputs.push_back({same_a ? a : random_matrix(rng, own_rows, o.k, o.dtype),
                           same_b ? b : random_matrix(rng, o.n, o.k, o.dtype)});
  }
}

/// The matrix with all rows but [begin, end) unset.
Matrix only_rows(const Matrix& whole, std::int64_t begin, std::int64_t end) {
  Matrix part(whole.rows(), whole.cols(), whole.dtype());
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t j = 0; j < whole.cols(); ++j) part.set(i, j, whole.at(i, j));
  }
  return part;
}

/// The columns of A that this rank has at the start of an AllToAllGemm.
Matrix own_columns(const SlicedCall& call, const Matrix& whole, int rank) {
  const auto begins = slice_begins(call.heads.columns, call.options.k, call.world_size);
  const auto r = static_cast<std::size_t>(rank);
  Matrix part(whole.rows(), begins[r + 1] - begins[r], whole.dtype());
  part.fill([&](std::int64_t i, std::int64_t j) { return whole.at(i, begins[r] + j); });
  return part;
}

/// The same elements in `num_pieces` pieces of columns, one dense matrix after the other, as one row.
Matrix in_pieces(const Matrix& whole, std::int64_t num_pieces) {
  Matrix pieces(1, whole.rows() * whole.cols(), whole.dtype());
  std::int64_t next = 0;
  for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
    const std::int64_t begin = piece * whole.cols() / num_pieces;
    const std::int64_t end = (piece + 1) * whole.cols() / num_pieces;
    for (std::int64_t i = 0; i < whole.rows(); ++i) {
      for (std::int64_t j = begin; j < end; ++j) pieces.set(0, next++, whole.at(i, j));
    }
  }
  return pieces;
}

std::int64_t num_slices_of(const SlicedCall& call) {
  return 1 + call.options.m % 4;
}

/// This rank's columns of the product that its output has.
std::pair<std::int64_t, std::int64_t> columns_of(const SlicedCall& call, int rank) {
  if (call.kind != SlicedKind::kHeads) return {0, call.options.n};
  const auto begins = slice_begins(call.heads.columns, call.options.n, call.world_size);
  const auto r = static_cast<std::size_t>(rank);
  return {begins[r], begins[r + 1]};
}

Matrix bias_of(const SlicedCall& call, int rank) {
  std::mt19937_64 rng(call.epilogue_seed + static_cast<std::uint64_t>(rank));
  const auto [begin, end] = columns_of(call, rank);
  return random_matrix(rng, 1, end - begin, call.options.dtype);
}

Matrix run(GemmOperator& op, const SlicedCall& call, int rank, const Matrix& bias, Method method) {
  const RankInputs& inputs = call.inputs[static_cast<std::size_t>(rank)];
  const auto begins = begins_of(call);
  const std::int64_t begin = begins[static_cast<std::size_t>(rank)];
  const std::int64_t end = begins[static_cast<std::size_t>(rank) + 1];
  // What is to arrive is not there before.
  const bool gathers_a = call.kind == SlicedKind::kAllGather;
  const bool gathers_b = call.kind == SlicedKind::kShardedWeight;
  const Matrix a = gathers_a                             ? only_rows(inputs.a, begin, end)
                   : call.kind == SlicedKind::kFromHeads ? own_columns(call, inputs.a, rank)
                                                         : inputs.a;
  const bool takes_pieces = call.kind == SlicedKind::kFromHeads && method == Method::kSliced;
  const Matrix pieces = takes_pieces ? in_pieces(a, num_slices_of(call)) : Matrix(0, 0, call.options.dtype);
  const Matrix b = gathers_b ? only_rows(inputs.b, begin, end) : inputs.b;
  const std::int64_t cols = bias.cols();
  Matrix out(op.output_rows(), cols, call.options.dtype, cols + call.output_padding);
  Operands operands = operands_of(a, b, out);
  if (takes_pieces) operands.a = pieces.data();
  if (call.with_bias) operands.epilogue.bias = bias.data();
  operands.epilogue.activation = call.activation;
  op(operands, method);
  EXPECT_TRUE(out.guards_intact());
  if (gathers_a && call.options.n > 0) {
    EXPECT_TRUE(a == inputs.a) << "A is not complete";
  }
  if (gathers_b && call.options.m > 0) {
    EXPECT_TRUE(b == inputs.b) << "B is not complete";
  }
  return out;
}

/// What output row `row` of `rank` is the sum of.
std::vector<Term> terms_of(const SlicedCall& call, int rank, std::int64_t row) {
  std::vector<Term> terms;
  if (reduces(call)) {
    const std::int64_t begin = begins_of(call)[static_cast<std::size_t>(rank)];
    for (int source = 0; source < call.world_size; ++source) terms.push_back({source, begin + row});
  } else if (call.kind == SlicedKind::kHeads) {
    const auto rows = slice_begins(call.heads.rows, call.options.m, call.world_size);
    const auto source = std::ranges::upper_bound(rows, row) - rows.begin() - 1;
    terms.push_back({source, row - rows[static_cast<std::size_t>(source)]});
  } else if (call.kind == SlicedKind::kFromHeads) {
    const auto rows = slice_begins(call.heads.rows, call.options.m, call.world_size);
    terms.push_back({rank, rows[static_cast<std::size_t>(rank)] + row});
  } else {
    terms.push_back({rank, row});
  }
  return terms;
}

void check_row(const Matrix& out, std::int64_t row, const SlicedCall& call, int rank, const Matrix& bias) {
  const auto [begin, end] = columns_of(call, rank);
  std::vector<Bounded> sums;
  for (std::int64_t col = begin; col < end; ++col) {
    sums.push_back(reference_sum(call.inputs, terms_of(call, rank, row), col));
  }
  ReferenceEpilogue epilogue;
  epilogue.bias = call.with_bias ? &bias : nullptr;
  epilogue.activation = call.activation;
  const ReferenceRow expected = reference_row(epilogue, row, sums, call.options.dtype);
  for (std::size_t j = 0; j < expected.out.size(); ++j) {
    const auto col = static_cast<std::int64_t>(j);
    ASSERT_NEAR(static_cast<double>(out.at(row, col)), expected.out[j].value, expected.out[j].error)
        << "row " << row << ", column " << col << " of rank " << rank;
  }
}

}  // namespace

std::string to_text(const SlicedCall& call) {
  const GemmOptions& o = call.options;
  return fmt::format(
      "operator {} ranks {} threads {} m {} n {} k {} {} tile {}x{} swizzle {} slices [{}] parts {} rows "
      "[{}] "
      "columns [{}] parts {} bias {} activation {} padding {}",
      static_cast<int>(call.kind), call.world_size, call.num_threads, o.m, o.n, o.k, name_of(o.dtype),
      o.tile_m, o.tile_n, o.swizzle, fmt::join(call.slices.sizes, ","), call.slices.parts,
      fmt::join(call.heads.rows.sizes, ","), fmt::join(call.heads.columns.sizes, ","),
      call.heads.columns.parts, call.with_bias, name_of(call.activation), call.output_padding);
}

SlicedCall make_sliced_call(std::mt19937_64& rng, std::int64_t largest) {
  SlicedCall call;
  call.kind = static_cast<SlicedKind>(pick(rng, 0, 5));
  call.world_size = static_cast<int>(pick(rng, 1, 9));
  call.num_threads = static_cast<int>(pick(rng, 1, 3));
  GemmOptions& options = call.options;
  options.m = pick_size(rng, largest);
  options.n = pick_size(rng, largest);
  options.k = pick_size(rng, largest);
  options.dtype = static_cast<DType>(pick(rng, 0, 2));
  options.tile_m = pick(rng, 4, 60);
  options.tile_n = pick(rng, 4, 60);
  options.swizzle = pick(rng, 1, 4);
  call.slices =
      random_slices(rng, call.kind == SlicedKind::kShardedWeight ? options.n : options.m, call.world_size);
  call.heads = {
      random_slices(rng, options.m, call.world_size),
      random_slices(rng, call.kind == SlicedKind::kFromHeads ? options.k : options.n, call.world_size)};
  make_inputs(rng, call);
  call.with_bias = pick(rng, 0, 1) == 1;
  call.activation = static_cast<Activation>(pick(rng, 0, 3));
  call.output_padding = pick(rng, 0, 1) * pick(rng, 0, 9);
  call.epilogue_seed = rng();
  return call;
}

std::unique_ptr<GemmOperator> make_operator(Context& context, const SlicedCall& call) {
  const BaselineOptions baseline{.num_slices = num_slices_of(call)};
  switch (call.kind) {
    case SlicedKind::kAllGather:
      return std::make_unique<AllGatherGemm>(context, call.options, call.slices);
    case SlicedKind::kShardedWeight:
      return std::make_unique<ShardedWeightGemm>(context, call.options, call.slices);
    case SlicedKind::kReduceScatter:
      return std::make_unique<GemmReduceScatter>(context, call.options, OverlapMethod::kTailFree, call.slices,
                                                 baseline);
    case SlicedKind::kGradient:
      return std::make_unique<GradientReduceScatter>(context, call.options, call.slices, baseline);
    case SlicedKind::kHeads:
      return std::make_unique<GemmAllToAll>(context, call.options, call.heads, baseline);
    case SlicedKind::kFromHeads:
      return std::make_unique<AllToAllGemm>(context, call.options, call.heads, baseline);
  }
  return nullptr;
}

void check_call(GemmOperator& op, const SlicedCall& call, int rank) {
  const Matrix bias = bias_of(call, rank);
  const Matrix serial = run(op, call, rank, bias, Method::kSerial);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const Matrix overlapped = run(op, call, rank, bias, Method::kOverlap);
    EXPECT_TRUE(overlapped == serial) << "overlapped and serial differ on rank " << rank;
  }
  if (reduces(call)) {
    EXPECT_TRUE(run(op, call, rank, bias, Method::kSliced) == serial) << "sliced differs on rank " << rank;
  }
  if (call.kind == SlicedKind::kHeads) {
    const Matrix sliced = run(op, call, rank, bias, Method::kSliced);
    const std::vector<std::int64_t> order = sliced_rows(call.heads.rows, call.options.m, call.world_size,
                                                        call.options.tile_m, num_slices_of(call));
    for (std::int64_t i = 0; i < sliced.rows(); ++i) {
      for (std::int64_t j = 0; j < sliced.cols(); ++j) {
        const std::int64_t row = order[static_cast<std::size_t>(i)];
        ASSERT_EQ(sliced.at(i, j), serial.at(row, j)) << "row " << row << " of rank " << rank;
      }
    }
  }
  const Matrix other = call.kind == SlicedKind::kFromHeads ? run(op, call, rank, bias, Method::kSliced)
                                                           : Matrix(0, 0, call.options.dtype);
  const std::int64_t rows = serial.rows();
  const std::int64_t row_cost = std::max<std::int64_t>(1, serial.cols() * call.options.k * call.world_size);
  const std::int64_t step = std::max<std::int64_t>(1, rows * row_cost / kReferenceBudget);
  for (std::int64_t row = rank % step; row < rows; row += step) {
    check_row(serial, row, call, rank, bias);
    if (other.rows() > 0) check_row(other, row, call, rank, bias);  // summed in another order
  }
}

}  // namespace flashoverlap::test

#include "sliced_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace flashoverlap::cli {
namespace {

bool gathers(const SlicedProblem& p) {
  return p.op == SlicedOp::kAllGatherGemm || p.op == SlicedOp::kShardedWeight;
}

bool reduces(const SlicedProblem& p) {
  return p.op == SlicedOp::kGradient;
}

/// Rows of `whole` in the order `order` (empty: as they are), all but those in [begin, end) unset.
Matrix own_rows(const Matrix& whole, const std::vector<std::int64_t>& order, std::int64_t begin,
                std::int64_t end) {
  Matrix part(whole.rows(), whole.cols(), whole.dtype());
  std::vector<float> row(static_cast<std::size_t>(whole.cols()));
  for (std::int64_t i = 0; i < whole.rows(); ++i) {
    const std::int64_t source = order.empty() ? i : order[static_cast<std::size_t>(i)];
    if (source < begin || source >= end) continue;
    whole.read_row(source, row.data());
    part.write_row(i, row.data());
  }
  return part;
}

/// Columns [begin, end) of `whole`, dense.
Matrix own_columns(const Matrix& whole, std::int64_t begin, std::int64_t end) {
  Matrix part(whole.rows(), end - begin, whole.dtype());
  std::vector<float> row(static_cast<std::size_t>(whole.cols()));
  for (std::int64_t i = 0; i < whole.rows(); ++i) {
    whole.read_row(i, row.data());
    part.write_row(i, row.data() + begin);
  }
  return part;
}

/// The same elements in pieces of columns, one dense matrix after the other: see
/// plan_sliced_all_to_all_gemm. As one row.
Matrix in_pieces(const Matrix& whole, std::int64_t num_pieces) {
  Matrix pieces(1, whole.rows() * whole.cols(), whole.dtype());
  std::vector<float> all(static_cast<std::size_t>(pieces.cols()));
  std::vector<float> row(static_cast<std::size_t>(whole.cols()));
  for (std::int64_t i = 0; i < whole.rows(); ++i) {
    whole.read_row(i, row.data());
    for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
      const std::int64_t begin = piece * whole.cols() / num_pieces;
      const std::int64_t end = (piece + 1) * whole.cols() / num_pieces;
      std::copy(row.data() + begin, row.data() + end, all.data() + whole.rows() * begin + i * (end - begin));
    }
  }
  pieces.write_row(0, all.data());
  return pieces;
}

}  // namespace

std::vector<Inputs> make_sliced_inputs(const SlicedProblem& p) {
  const DType dtype = parse_dtype(p.dtype);
  const auto rows = slice_begins({}, p.m, static_cast<std::int32_t>(p.ranks));
  std::vector<Inputs> inputs;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(p.ranks); ++rank) {
    const bool same_a = p.op == SlicedOp::kAllGatherGemm || p.op == SlicedOp::kFromHeads;
    const bool same_b = p.op == SlicedOp::kShardedWeight || plan::along_heads(p.op);
    const std::int64_t m = p.op == SlicedOp::kHeads ? rows[rank + 1] - rows[rank] : p.m;
    inputs.push_back({random_matrix(m, p.k, dtype, p.seed, same_a ? 0 : 2 * rank),
                      random_matrix(p.n, p.k, dtype, p.seed, same_b ? 1 : 2 * rank + 1)});
  }
  return inputs;
}

SlicedData::SlicedData(const SlicedProblem& problem, const std::vector<Inputs>& inputs, std::size_t rank,
                       const GemmOperator& op)
    : problem_(problem),
      inputs_(inputs),
      rank_(rank),
      out_(op.output_rows(), op.plan().output_cols, parse_dtype(problem.dtype)) {
  const SlicedProblem& p = problem_;
  const auto world = static_cast<std::int32_t>(p.ranks);
  const bool columns = p.op == SlicedOp::kShardedWeight;
  begins_ = slice_begins(slice_options(p), sliced_size(p), world);
  rows_ = slice_begins({}, p.m, world);
  if (p.op == SlicedOp::kFromHeads) {
    gathered_ = own_columns(inputs[rank_].a, begins_[rank_], begins_[rank_ + 1]);
    sliced_ = in_pieces(gathered_, p.baseline_slices);
  }
  const TileGrid& grid = op.plan().grid;
  if (p.op == SlicedOp::kHeads) order_ = sliced_rows({}, p.m, world, grid.tile_m(), p.baseline_slices);
  if (!gathers(p)) return;
  order_ = sliced_rows(slice_options(p), sliced_size(p), world, columns ? grid.tile_n() : grid.tile_m(),
                       p.baseline_slices);
  const Matrix& whole = columns ? inputs[rank_].b : inputs[rank_].a;
  gathered_ = own_rows(whole, {}, begins_[rank_], begins_[rank_ + 1]);
  sliced_ = own_rows(whole, order_, begins_[rank_], begins_[rank_ + 1]);
}

const Matrix& SlicedData::a(Method method) const {
  if (problem_.op != SlicedOp::kAllGatherGemm && problem_.op != SlicedOp::kFromHeads) return inputs_[rank_].a;
  return method == Method::kSliced ? sliced_ : gathered_;
}

const Matrix& SlicedData::b(Method method) const {
  if (problem_.op != SlicedOp::kShardedWeight) return inputs_[rank_].b;
  return method == Method::kSliced ? sliced_ : gathered_;
}

std::int64_t SlicedData::lda() const {
  return problem_.op == SlicedOp::kFromHeads ? gathered_.cols() : problem_.k;
}

std::string SlicedData::check(const Matrix& out, Method method, SumRounding sums, double& max_error) const {
  constexpr std::int64_t kSample = 2000;
  const std::int64_t size = out.rows() * out.cols();
  std::mt19937_64 random(problem_.seed + rank_);
  std::vector<float> row(static_cast<std::size_t>(out.cols()));
  for (std::int64_t i = 0; i < std::min(kSample, size); ++i) {
    const auto index = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(size));
    const std::int64_t at_row = index / out.cols();
    const std::int64_t at_col = index % out.cols();
    out.read_row(at_row, row.data());
    const double actual = static_cast<double>(row[static_cast<std::size_t>(at_col)]);
    const Expected expected = element(at_row, at_col, method, sums);
    const double error = std::abs(actual - expected.value);
    max_error = std::max(max_error, error);
    if (!(error <= expected.tolerance)) {
      return fmt::format("rank {}, element [{}, {}] is {}; expected {} within {:.3g}", rank_, at_row, at_col,
                         actual, expected.value, expected.tolerance);
    }
  }
  return {};
}

SlicedData::Expected SlicedData::element(std::int64_t row, std::int64_t col, Method method,
                                         SumRounding sums) const {
  const SlicedProblem& p = problem_;
  const bool sliced = method == Method::kSliced;
  std::size_t first = rank_;
  std::size_t last = rank_;
  if (sliced && p.op == SlicedOp::kAllGatherGemm) row = order_[static_cast<std::size_t>(row)];
  if (sliced && p.op == SlicedOp::kShardedWeight) col = order_[static_cast<std::size_t>(col)];
  if (reduces(p)) {
    row += begins_[rank_];
    first = 0;
    last = inputs_.size() - 1;
  }
  if (p.op == SlicedOp::kHeads) {
    if (sliced) row = order_[static_cast<std::size_t>(row)];
    first = last = static_cast<std::size_t>(std::ranges::upper_bound(rows_, row) - rows_.begin() - 1);
    row -= rows_[first];
    col += begins_[rank_];
  }
  if (p.op == SlicedOp::kFromHeads) row += rows_[rank_];
  const DType dtype = parse_dtype(p.dtype);
  const double storage = dtype == DType::kFloat32 ? 0 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  std::vector<float> a(static_cast<std::size_t>(p.k));
  std::vector<float> b(a.size());
  Expected expected;
  double magnitudes = 0;
  for (std::size_t source = first; source <= last; ++source) {
    inputs_[source].a.read_row(row, a.data());
    inputs_[source].b.read_row(col, b.data());
    double partial = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      partial += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    expected.value += partial;
    magnitudes += std::abs(partial);
    expected.tolerance += 2 * static_cast<double>(p.k + 1) * 0x1p-24 + storage * std::abs(partial);
  }
  const std::size_t ranks = last - first + 1;
  if (sums == SumRounding::kEverySum && ranks > 2)
    expected.tolerance += storage * magnitudes * static_cast<double>(ranks - 2);
  expected.tolerance =
      1.01 * (expected.tolerance + storage * std::abs(expected.value)) + (storage > 0 ? 0x1p-24 : 0);
  return expected;
}

}  // namespace flashoverlap::cli

#include "result_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace flashoverlap::cli {
namespace {

/// Elements of each output that are computed one by one; all are where that takes no more than so many steps.
constexpr std::int64_t kSampleSize = 4096;
constexpr double kCheapSteps = 3e7;

constexpr double kFloatRoundOff = 0x1p-24;

/// 0 for float32: its rounding is part of the accumulation's tolerance.
double storage_round_off(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0;
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
  }
  return 0;
}

/// Half of float16's smallest number: the error of results that are close to 0.
constexpr double kSmallestStep = 0x1p-25;

double dot(const std::vector<float>& x, const std::vector<float>& y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  return sum;
}

double dot(const std::vector<float>& x, const std::vector<double>& y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += static_cast<double>(x[i]) * y[i];
  return sum;
}

/// The rows of the sum that a rank keeps.
std::vector<std::int64_t> reduced_rows(const ProblemOptions& options, std::int64_t tile_m, int rank) {
  const auto ranks = static_cast<std::int32_t>(options.ranks);
  if (options.slices.sizes.empty()) return owned_rows(options.m, tile_m, ranks, rank, options.rows);
  const std::vector<std::int64_t> begins = slice_begins(options.slices, options.m, ranks);
  const auto r = static_cast<std::size_t>(rank);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(begins[r + 1] - begins[r]));
  std::iota(rows.begin(), rows.end(), begins[r]);
  return rows;
}

std::vector<float> row_of(const Matrix& matrix, std::int64_t row) {
  std::vector<float> values(static_cast<std::size_t>(matrix.cols()));
  matrix.read_row(row, values.data());
  return values;
}

}  // namespace

void CheckResult::merge(const CheckResult& other) {
  if (wrong.empty()) wrong = other.wrong;
  // error / tolerance, compared without dividing by a tolerance of 0; NaN is worse than anything.
  const bool other_is_worse = !(other.max_error * tolerance <= max_error * other.tolerance) || elements == 0;
  if (other.elements > 0 && !std::isnan(max_error) && other_is_worse) {
    max_error = other.max_error;
    tolerance = other.tolerance;
  }
  elements += other.elements;
}

ResultCheck::ResultCheck(const ProblemOptions& options, const Routing& routing,
                         const std::vector<Inputs>& inputs, std::int64_t tile_m, SumRounding sums)
    : options_(options), sums_(sums), inputs_(inputs) {
  const int ranks = static_cast<int>(options.ranks);
  rows_.resize(inputs.size());
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<Source>& rows = rows_[static_cast<std::size_t>(rank)];
    if (options.op == Op::kGemmAllReduce) {
      for (std::int64_t row = 0; row < options.m; ++row) rows.push_back({row, 0, ranks});
    } else if (options.op == Op::kGemmReduceScatter) {
      for (const std::int64_t row : reduced_rows(options, tile_m, rank)) rows.push_back({row, 0, ranks});
    } else {
      for (int source = 0; source < ranks; ++source) {
        const auto& destinations = routing.destinations[static_cast<std::size_t>(source)];
        for (std::int64_t row = 0; row < std::ssize(destinations); ++row) {
          if (destinations[static_cast<std::size_t>(row)] == rank) rows.push_back({row, source, 1});
        }
      }
    }
  }
  project_inputs();
}

void ResultCheck::project_inputs() {
  std::mt19937_64 random(options_.seed ^ 0x5167'4E53U);
  for (std::int64_t col = 0; col < options_.n; ++col) signs_.push_back((random() & 1U) == 0 ? 1 : -1);
  for (const Inputs& inputs : inputs_) {
    std::vector<double> weight_projection(static_cast<std::size_t>(options_.k));  // B^T v
    for (std::int64_t col = 0; col < options_.n; ++col) {
      const std::vector<float> weights = row_of(inputs.b, col);
      const double sign = signs_[static_cast<std::size_t>(col)];
      for (std::size_t i = 0; i < weights.size(); ++i)
        weight_projection[i] += sign * static_cast<double>(weights[i]);
    }
    std::vector<double>& projections = projections_.emplace_back();
    for (std::int64_t row = 0; row < options_.m; ++row) {
      projections.push_back(dot(row_of(inputs.a, row), weight_projection));
    }
  }
}

CheckResult ResultCheck::check(int rank, const Matrix& out) const {
  CheckResult result;
  if (out.rows() != output_rows(rank) || out.cols() != options_.n) {
    result.wrong = fmt::format("rank {}: the output is {}x{}; expected {}x{}", rank, out.rows(), out.cols(),
                               output_rows(rank), options_.n);
    return result;
  }
  if (out.rows() == 0 || out.cols() == 0) return result;
  check_elements(rank, out, result);
  check_projections(rank, out, result);
  return result;
}

ResultCheck::Expected ResultCheck::element(const Source& source, std::int64_t col) const {
  const double round_off = storage_round_off(options_.dtype);
  Expected expected;
  double magnitude = 0;
  for (int i = 0; i < source.num_ranks; ++i) {
    const Inputs& inputs = inputs_[static_cast<std::size_t>(source.first_rank) + static_cast<std::size_t>(i)];
    const double partial = dot(row_of(inputs.a, source.row), row_of(inputs.b, col));
    expected.value += partial;
    magnitude += std::abs(partial);
    expected.tolerance +=
        2 * static_cast<double>(options_.k + 1) * kFloatRoundOff + round_off * std::abs(partial);
  }
  expected.tolerance += round_off * (std::abs(expected.value) + num_rounded_sums(source) * magnitude);
  // Second-order terms: the roundings are those of computed values, not of exact ones.
  constexpr double kSlack = 1.01;
  expected.tolerance = kSlack * expected.tolerance + (round_off > 0 ? kSmallestStep * source.num_ranks : 0);
  return expected;
}

double ResultCheck::projection(const Source& source) const {
  double sum = 0;
  for (int i = 0; i < source.num_ranks; ++i) {
    const auto rank = static_cast<std::size_t>(source.first_rank) + static_cast<std::size_t>(i);
    sum += projections_[rank][static_cast<std::size_t>(source.row)];
  }
  return sum;
}

double ResultCheck::projection_tolerance(const Source& source) const {
  const double ranks = source.num_ranks;
  const auto k = static_cast<double>(options_.k);
  // Three standard deviations of a partial result and of the sum stand for their magnitudes.
  const double storage = storage_round_off(options_.dtype) *
                         (ranks * std::sqrt(k) + (1 + num_rounded_sums(source)) * std::sqrt(ranks * k));
  return 2 * std::sqrt(static_cast<double>(options_.n)) *
         (2 * ranks * (k + 1) * kFloatRoundOff + storage + ranks * kSmallestStep);
}

void ResultCheck::check_projections(int rank, const Matrix& out, CheckResult& result) const {
  for (std::int64_t row = 0; row < out.rows() && result.wrong.empty(); ++row) {
    const Source& source = rows_of(rank)[static_cast<std::size_t>(row)];
    const double actual = dot(row_of(out, row), signs_);
    const double expected = projection(source);
    const double tolerance = projection_tolerance(source);
    if (std::abs(actual - expected) <= tolerance) continue;
    result.wrong = fmt::format(
        "rank {}, row {} (row {} of the product): its projection is {}; expected {} within {:.3g}", rank, row,
        source.row, actual, expected, tolerance);
  }
}

void ResultCheck::check_elements(int rank, const Matrix& out, CheckResult& result) const {
  const auto size = static_cast<double>(out.rows()) * static_cast<double>(out.cols());
  const double ranks = rows_of(rank).front().num_ranks;
  const double cost = size * (static_cast<double>(options_.k) * ranks + static_cast<double>(options_.n));
  const bool all = cost <= kCheapSteps;
  const std::int64_t count = all ? out.rows() * out.cols() : std::min(kSampleSize, out.rows() * out.cols());
  std::mt19937_64 random(options_.seed + static_cast<std::uint64_t>(rank));
  std::uniform_int_distribution<std::int64_t> pick(0, out.rows() * out.cols() - 1);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t index = all ? i : pick(random);
    const std::int64_t row = index / out.cols();
    const std::int64_t col = index % out.cols();
    const Source& source = rows_of(rank)[static_cast<std::size_t>(row)];
    const double actual = static_cast<double>(row_of(out, row)[static_cast<std::size_t>(col)]);
    const Expected expected = element(source, col);
    CheckResult one{std::abs(actual - expected.value), expected.tolerance, 1, {}};
    if (!(one.max_error <= one.tolerance)) {
      one.wrong = fmt::format("rank {}, element [{}, {}] is {}; expected {} within {:.3g}", rank, row, col,
                              actual, expected.value, expected.tolerance);
    }
    result.merge(one);
  }
}

}  // namespace flashoverlap::cli

#include "moe_data.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "option_values.h"

namespace flashoverlap::cli {
namespace {

constexpr std::uint64_t kUpStream = 1'000'000;
constexpr std::uint64_t kDownStream = 2'000'000;

/// As a trained layer's, so that values stay near 1.
Matrix scaled_random(std::int64_t rows, std::int64_t cols, DType dtype, std::uint64_t seed,
                     std::uint64_t stream) {
  Matrix matrix = random_matrix(rows, cols, dtype, seed, stream);
  std::vector<float> row(static_cast<std::size_t>(cols));
  const float scale = 1.5F / std::sqrt(static_cast<float>(std::max<std::int64_t>(1, cols)));
  for (std::int64_t r = 0; r < rows; ++r) {
    matrix.read_row(r, row.data());
    for (float& value : row) value *= scale;
    matrix.write_row(r, row.data());
  }
  return matrix;
}

void copy_into(const Matrix& from, Matrix& to, std::int64_t first, std::vector<float>& row) {
  for (std::int64_t r = 0; r < from.rows(); ++r) {
    from.read_row(r, row.data());
    to.write_row(first + r, row.data());
  }
}

/// Adds weight * expert(x) in float64.
void add_expert(const MoeProblem& p, const ExpertWeights& expert, const std::vector<float>& x, double weight,
                std::vector<double>& sum) {
  std::vector<float> row(static_cast<std::size_t>(std::max(p.hidden, p.intermediate)));
  const auto dot = [&](const Matrix& matrix, std::int64_t r, const auto& with) {
    matrix.read_row(r, row.data());
    double value = 0;
    for (std::size_t i = 0; i < with.size(); ++i)
      value += static_cast<double>(row[i]) * static_cast<double>(with[i]);
    return value;
  };
  std::vector<double> middle(static_cast<std::size_t>(p.intermediate));
  for (std::int64_t i = 0; i < p.intermediate; ++i) {
    const double gate = dot(expert.up, i, x);
    middle[static_cast<std::size_t>(i)] =
        gate / (1 + std::exp(-gate)) * dot(expert.up, p.intermediate + i, x);
  }
  for (std::int64_t h = 0; h < p.hidden; ++h)
    sum[static_cast<std::size_t>(h)] += weight * dot(expert.down, h, middle);
}

}  // namespace

ExpertWeights weights_of_expert(const MoeProblem& p, std::int64_t expert) {
  const DType dtype = parse_dtype(p.dtype);
  const auto stream = static_cast<std::uint64_t>(expert);
  return {scaled_random(2 * p.intermediate, p.hidden, dtype, p.seed, kUpStream + stream),
          scaled_random(p.hidden, p.intermediate, dtype, p.seed, kDownStream + stream)};
}

Matrix tokens_of_rank(const MoeProblem& p, std::int64_t rank) {
  return random_matrix(p.tokens, p.hidden, parse_dtype(p.dtype), p.seed, static_cast<std::uint64_t>(rank));
}

std::vector<std::int64_t> checked_tokens(std::int64_t tokens) {
  constexpr std::int64_t kTokens = 3;
  const std::int64_t count = std::min(kTokens, tokens);
  std::vector<std::int64_t> checked;
  for (std::int64_t i = 0; i < count; ++i) {
    checked.push_back(i * (tokens - 1) / std::max<std::int64_t>(1, count - 1));
  }
  return checked;
}

MoeRankData::MoeRankData(const MoeProblem& p, int rank, std::int64_t first_expert, std::int64_t experts)
    : x(tokens_of_rank(p, rank)),
      out(p.tokens, p.hidden, parse_dtype(p.dtype)),
      up(experts * 2 * p.intermediate, p.hidden, parse_dtype(p.dtype)),
      down(experts * p.hidden, p.intermediate, parse_dtype(p.dtype)) {
  // There may be billions of weights: all processors draw them, for all ranks at a time.
  const std::int64_t threads = std::clamp<std::int64_t>(std::thread::hardware_concurrency() / p.ranks, 1,
                                                        std::max<std::int64_t>(1, experts));
  const auto draw = [&](std::int64_t begin) {
    std::vector<float> row(static_cast<std::size_t>(std::max(p.hidden, p.intermediate)));
    for (std::int64_t e = begin; e < experts; e += threads) {
      const ExpertWeights expert = weights_of_expert(p, first_expert + e);
      copy_into(expert.up, up, e * 2 * p.intermediate, row);
      copy_into(expert.down, down, e * p.hidden, row);
    }
  };
  std::vector<std::jthread> workers;
  for (std::int64_t t = 1; t < threads; ++t) workers.emplace_back(draw, t);
  draw(0);
}

double moe_error(const MoeProblem& p, const MoeRouting& routing, const MoeRankData& data,
                 std::int64_t& checked) {
  if (p.capacity > 0) return 0;  // which slots count is then not this rank's to know
  double error = 0;
  double largest = 0;
  std::vector<float> x(static_cast<std::size_t>(p.hidden));
  std::vector<float> got(static_cast<std::size_t>(p.hidden));
  for (const std::int64_t token : checked_tokens(routing.tokens)) {
    data.x.read_row(token, x.data());
    std::vector<double> expected(x.size(), 0);
    for (std::int32_t slot = 0; slot < routing.top_k; ++slot) {
      if (routing.expert(token, slot) < 0) continue;
      add_expert(p, weights_of_expert(p, routing.expert(token, slot)), x,
                 static_cast<double>(routing.weight(token, slot)), expected);
    }
    data.out.read_row(token, got.data());
    for (std::size_t h = 0; h < got.size(); ++h) {
      const double difference = std::abs(static_cast<double>(got[h]) - expected[h]);
      error = std::isnan(difference) ? difference : std::max(error, difference);
      largest = std::max(largest, std::abs(expected[h]));
    }
    ++checked;
  }
  return largest > 0 ? error / largest : error;
}

double moe_error_limit(DType dtype) {
  if (dtype == DType::kFloat32) return 1e-5;
  return dtype == DType::kFloat16 ? 8e-3 : 6.4e-2;
}

}  // namespace flashoverlap::cli

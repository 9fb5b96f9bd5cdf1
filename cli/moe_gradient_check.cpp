#include "moe_gradient_check.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "option_values.h"

namespace flashoverlap::cli {
namespace {

constexpr std::uint64_t kGradientStream = 3'000'000;

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

Matrix gradient_of_rank(const MoeProblem& p, std::int64_t rank) {
  return random_matrix(p.tokens, p.hidden, parse_dtype(p.dtype), p.seed,
                       kGradientStream + static_cast<std::uint64_t>(rank));
}

/// A matrix in float64.
struct Doubles {
  explicit Doubles(const Matrix& matrix) : cols(matrix.cols()) {
    std::vector<float> row(index(cols));
    for (std::int64_t r = 0; r < matrix.rows(); ++r) {
      matrix.read_row(r, row.data());
      values.insert(values.end(), row.begin(), row.end());
    }
  }
  [[nodiscard]] const double* row(std::int64_t r) const { return values.data() + r * cols; }
  std::int64_t cols;
  std::vector<double> values;
};

double dot(const double* a, const double* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

struct ExpertInDoubles {
  explicit ExpertInDoubles(const ExpertWeights& weights) : up(weights.up), down(weights.down) {}
  Doubles up;
  Doubles down;
};

/// Column i of an expert's middle, for one token with weight 1.
struct Middle {
  double activated = 0;
  double gate_gradient = 0;
  double up_gradient = 0;
};

Middle middle_of(const MoeProblem& p, const ExpertInDoubles& expert, const double* x, const double* by_out,
                 std::int64_t i) {
  const double gate = dot(expert.up.row(i), x, p.hidden);
  const double up = dot(expert.up.row(p.intermediate + i), x, p.hidden);
  double by_activated = 0;
  for (std::int64_t h = 0; h < p.hidden; ++h) by_activated += by_out[h] * expert.down.row(h)[i];
  const double sigmoid = 1 / (1 + std::exp(-gate));
  return {.activated = gate * sigmoid * up,
          .gate_gradient = by_activated * up * sigmoid * (1 + gate * (1 - sigmoid)),
          .up_gradient = by_activated * gate * sigmoid};
}

/// Largest error of a gradient so far, and the largest element.
class Errors {
 public:
  void add(double got, double expected) {
    const double difference = std::abs(got - expected);
    if (!(difference <= error_))
      error_ = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
    largest_ = std::max(largest_, std::abs(expected));
    ++count_;
  }
  [[nodiscard]] double relative() const { return largest_ > 0 ? error_ / largest_ : error_; }
  [[nodiscard]] std::int64_t count() const { return count_; }

 private:
  double error_ = 0;
  double largest_ = 0;
  std::int64_t count_ = 0;
};

void check_token(const MoeProblem& p, const MoeRouting& routing, std::int64_t token, const double* x,
                 const double* by_out, const MoeGradientData& data, Errors& input, Errors& weights) {
  std::vector<double> expected(index(p.hidden), 0);
  for (std::int32_t slot = 0; slot < routing.top_k; ++slot) {
    double by_weight = 0;
    if (routing.expert(token, slot) >= 0) {
      const ExpertInDoubles expert(weights_of_expert(p, routing.expert(token, slot)));
      const auto weight = static_cast<double>(routing.weight(token, slot));
      for (std::int64_t i = 0; i < p.intermediate; ++i) {
        const Middle m = middle_of(p, expert, x, by_out, i);
        for (std::int64_t h = 0; h < p.hidden; ++h) {
          expected[index(h)] += weight * (m.gate_gradient * expert.up.row(i)[h] +
                                          m.up_gradient * expert.up.row(p.intermediate + i)[h]);
          by_weight += by_out[h] * expert.down.row(h)[i] * m.activated;
        }
      }
    }
    weights.add(static_cast<double>(data.routing_weights[index(token * routing.top_k + slot)]), by_weight);
  }
  std::vector<float> got(index(p.hidden));
  data.input.read_row(token, got.data());
  for (std::size_t h = 0; h < got.size(); ++h) input.add(static_cast<double>(got[h]), expected[h]);
}

/// Column `i` of the middle of this rank's first expert.
void check_expert(const MoeProblem& p, const std::vector<MoeRouting>& routings, std::int64_t expert,
                  std::int64_t i, const MoeGradientData& data, Errors& up, Errors& down) {
  const ExpertInDoubles weights(weights_of_expert(p, expert));
  std::vector<double> by_gate(index(p.hidden), 0);
  std::vector<double> by_up(index(p.hidden), 0);
  std::vector<double> by_down(index(p.hidden), 0);
  for (std::size_t owner = 0; owner < routings.size(); ++owner) {
    const Doubles x(tokens_of_rank(p, static_cast<std::int64_t>(owner)));
    const Doubles by_out(gradient_of_rank(p, static_cast<std::int64_t>(owner)));
    const MoeRouting& routing = routings[owner];
    for (std::int64_t at = 0; at < routing.tokens * routing.top_k; ++at) {
      if (routing.experts[index(at)] != expert) continue;
      const std::int64_t token = at / routing.top_k;
      const auto weight = static_cast<double>(routing.weights[index(at)]);
      const Middle m = middle_of(p, weights, x.row(token), by_out.row(token), i);
      for (std::int64_t h = 0; h < p.hidden; ++h) {
        by_gate[index(h)] += weight * m.gate_gradient * x.row(token)[h];
        by_up[index(h)] += weight * m.up_gradient * x.row(token)[h];
        by_down[index(h)] += weight * m.activated * by_out.row(token)[h];
      }
    }
  }
  for (std::int64_t h = 0; h < p.hidden; ++h) {
    up.add(static_cast<double>(data.up[index(i * p.hidden + h)]), by_gate[index(h)]);
    up.add(static_cast<double>(data.up[index((p.intermediate + i) * p.hidden + h)]), by_up[index(h)]);
    down.add(static_cast<double>(data.down[index(h * p.intermediate + i)]), by_down[index(h)]);
  }
}

}  // namespace

MoeGradientData::MoeGradientData(const MoeProblem& p, int rank, std::int64_t experts)
    : by_out(gradient_of_rank(p, rank)),
      input(p.tokens, p.hidden, parse_dtype(p.dtype)),
      routing_weights(index(p.tokens * p.top_k)),
      up(index(experts * 2 * p.intermediate * p.hidden)),
      down(index(experts * p.hidden * p.intermediate)) {}

MoeGradients MoeGradientData::gradients() {
  return {.input = input.data(),
          .input_ld = input.cols(),
          .routing_weights = routing_weights.data(),
          .up = up.data(),
          .down = down.data()};
}

void MoeGradientData::poison() {
  input.poison();
  for (std::vector<float>* values : {&routing_weights, &up, &down}) {
    std::ranges::fill(*values, std::numeric_limits<float>::quiet_NaN());
  }
}

bool MoeGradientData::equals(const MoeGradientData& other) const {
  return input == other.input && routing_weights == other.routing_weights && up == other.up &&
         down == other.down;
}

double moe_gradient_error(const MoeProblem& p, const std::vector<MoeRouting>& routings, int rank,
                          std::int64_t first_expert, std::int64_t experts, const MoeGradientData& data,
                          std::int64_t& checked) {
  if (p.capacity > 0) return 0;
  Errors input;
  Errors weights;
  Errors up;
  Errors down;
  const MoeRouting& routing = routings[index(rank)];
  const Doubles x(tokens_of_rank(p, rank));
  const Doubles by_out(data.by_out);
  for (const std::int64_t token : checked_tokens(routing.tokens)) {
    check_token(p, routing, token, x.row(token), by_out.row(token), data, input, weights);
  }
  if (experts > 0) check_expert(p, routings, first_expert, p.intermediate / 2, data, up, down);
  double error = 0;
  for (const Errors* errors : {&input, &weights, &up, &down}) {
    checked += errors->count();
    error = std::max(error, errors->relative());
  }
  return error;
}

double moe_gradient_error_limit(DType dtype) {
  return 4 * moe_error_limit(dtype);
}

}  // namespace flashoverlap::cli

#include "attention.h"

#include <algorithm>
#include <cmath>

namespace flashoverlap::layers {
namespace {

using Doubles = std::vector<double>;

/// Of one token, head by head, with what needs no other token's k or v: q_h · k_t = (K_h^T · q_h) · x_t,
/// where K_h are the rows of the QKV weight that make k of head h, and sum_t(w_t v_t) = V_h · sum_t(w_t x_t).
/// A sample of tokens then takes no projection of all of them.
class ExactAttention {
 public:
  explicit ExactAttention(const AttentionValues& values)
      : values_(values), hidden_(hidden_of(values.shape)), size_(values.shape.head_size) {}

  /// One row of the layer's output.
  [[nodiscard]] Doubles out(std::int64_t token) const {
    std::vector<Doubles> weights = scores(token);
    for (Doubles& of_head : weights) make_softmax(of_head);
    const std::vector<Doubles> means = mean_tokens(weights);
    Doubles attended;
    for (std::int64_t head = 0; head < values_.shape.heads; ++head) {
      const Doubles& mean = means[static_cast<std::size_t>(head)];
      for (std::int64_t p = 0; p < size_; ++p)
        attended.push_back(dot(mean.data(), weight_row(head, 2, p), hidden_));
    }
    Doubles result;
    for (std::int64_t j = 0; j < hidden_; ++j)
      result.push_back(dot(attended.data(), row_of(*values_.weight_out, hidden_, j), hidden_));
    return result;
  }

 private:
  /// Row p of q (0), k (1) or v (2) of a head in the QKV weight.
  [[nodiscard]] const float* weight_row(std::int64_t head, std::int64_t part, std::int64_t p) const {
    return row_of(*values_.weight_in, hidden_, (3 * head + part) * size_ + p);
  }
  [[nodiscard]] const float* token_row(std::int64_t token) const {
    return row_of(*values_.tokens, hidden_, token);
  }

  /// q · k^T / sqrt(size) of one token with all tokens, by head.
  [[nodiscard]] std::vector<Doubles> scores(std::int64_t token) const {
    std::vector<Doubles> keys;  // K_h^T · q_h
    for (std::int64_t head = 0; head < values_.shape.heads; ++head) {
      Doubles& key = keys.emplace_back(static_cast<std::size_t>(hidden_), 0.0);
      for (std::int64_t p = 0; p < size_; ++p) {
        const double q = dot(token_row(token), weight_row(head, 0, p), hidden_);
        add_scaled(q / std::sqrt(static_cast<double>(size_)), weight_row(head, 1, p), hidden_, key.data());
      }
    }
    std::vector<Doubles> scores(keys.size());
    for (std::int64_t t = 0; t < values_.shape.tokens; ++t) {
      for (std::size_t head = 0; head < keys.size(); ++head)
        scores[head].push_back(dot(keys[head].data(), token_row(t), hidden_));
    }
    return scores;
  }

  static void make_softmax(Doubles& scores) {
    const double largest = *std::ranges::max_element(scores);
    double total = 0;
    for (double& score : scores) total += score = std::exp(score - largest);
    for (double& score : scores) score /= total;
  }

  /// sum_t(w_t x_t), by head.
  [[nodiscard]] std::vector<Doubles> mean_tokens(const std::vector<Doubles>& weights) const {
    std::vector<Doubles> means(weights.size(), Doubles(static_cast<std::size_t>(hidden_), 0.0));
    for (std::int64_t t = 0; t < values_.shape.tokens; ++t) {
      for (std::size_t head = 0; head < means.size(); ++head)
        add_scaled(weights[head][static_cast<std::size_t>(t)], token_row(t), hidden_, means[head].data());
    }
    return means;
  }

  const AttentionValues& values_;
  std::int64_t hidden_;
  std::int64_t size_;
};

}  // namespace

AttentionValues::AttentionValues(const AttentionShape& whole, DType type, std::uint64_t seed)
    : shape(whole),
      dtype(type),
      tokens(random_tokens(shape.tokens, hidden_of(shape), dtype, seed, 0)),
      weight_in(random_weight(3 * hidden_of(shape), hidden_of(shape), dtype, seed, 1)),
      weight_out(random_weight(hidden_of(shape), hidden_of(shape), dtype, seed, 2)) {}

double attention_error(const AttentionValues& values,
                       const std::function<std::int64_t(std::int64_t)>& token_of, const Matrix& out) {
  const Values actual = out.read();
  const ExactAttention exact(values);
  const std::int64_t products = 2 * values.shape.heads * values.shape.tokens * out.cols();
  LargestError largest;
  for (const std::int64_t i : sample_rows(out.rows(), products)) {
    const Doubles expected = exact.out(token_of(i));
    const float* const row = row_of(actual, out.cols(), i);
    for (std::size_t j = 0; j < expected.size(); ++j) largest.add(static_cast<double>(row[j]), expected[j]);
  }
  return largest.share();
}

double largest_attention_error(const AttentionValues& values, int roundings) {
  const AttentionShape& shape = values.shape;
  // Stored before: q, k, v, the weights of the softmax, and what comes out of it.
  constexpr int kOfAttention = 5;
  return largest_share(values.dtype, 2 * hidden_of(shape) + shape.tokens + shape.head_size,
                       kOfAttention + roundings);
}

}  // namespace flashoverlap::layers

#include "attention.h"

#include <algorithm>
#include <cmath>

#include "values.h"

namespace flashoverlap::layers {
namespace {

/// out[size] = softmax(q · k^T / sqrt(size)) · v of one query and one head; k and v of token t are `stride`
/// elements behind those of the token before.
void attend_query(const float* q, const float* k, const float* v, std::int64_t stride, std::int64_t size,
                  std::vector<float>& weights, float* out) {
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  float largest = -std::numeric_limits<float>::infinity();
  for (std::size_t t = 0; t < weights.size(); ++t, k += stride) {
    float sum = 0;
    for (std::int64_t p = 0; p < size; ++p) sum += q[p] * k[p];
    weights[t] = sum * scale;
    largest = std::max(largest, weights[t]);
  }
  float total = 0;
  for (float& weight : weights) total += weight = std::exp(weight - largest);
  std::fill_n(out, size, 0.0F);
  for (std::size_t t = 0; t < weights.size(); ++t, v += stride) {
    const float weight = weights[t] / total;
    for (std::int64_t p = 0; p < size; ++p) out[p] += weight * v[p];
  }
}

/// One head's output for some tokens, in float64, into its columns of attended [queries, hidden].
void attend_exactly(const AttentionShape& shape, const Values& tokens, const Values& weight_in,
                    std::int64_t head, const std::vector<std::int64_t>& queries,
                    std::vector<double>& attended) {
  const std::int64_t hidden = hidden_of(shape);
  const std::int64_t size = shape.head_size;
  const std::int64_t row = 3 * head * size;  // of the QKV weight
  std::vector<double> k;
  std::vector<double> v;
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    for (std::int64_t p = 0; p < size; ++p) {
      k.push_back(dot(tokens, t, weight_in, row + size + p, hidden));
      v.push_back(dot(tokens, t, weight_in, row + 2 * size + p, hidden));
    }
  }
  for (std::size_t i = 0; i < queries.size(); ++i) {
    std::vector<double> weights;
    double total = 0;
    std::vector<double> q;
    for (std::int64_t p = 0; p < size; ++p) q.push_back(dot(tokens, queries[i], weight_in, row + p, hidden));
    for (std::size_t t = 0; t < static_cast<std::size_t>(shape.tokens); ++t) {
      double sum = 0;
      for (std::size_t p = 0; p < q.size(); ++p) sum += q[p] * k[t * q.size() + p];
      weights.push_back(std::exp(sum / std::sqrt(static_cast<double>(size))));
      total += weights.back();
    }
    double* to = attended.data() + i * static_cast<std::size_t>(hidden) + head * size;
    for (std::size_t t = 0; t < weights.size(); ++t) {
      for (std::size_t p = 0; p < q.size(); ++p) to[p] += weights[t] / total * v[t * q.size() + p];
    }
  }
}

}  // namespace

Values attention_tokens(const AttentionShape& shape, std::uint64_t seed) {
  return random_values(shape.tokens, hidden_of(shape), seed, 0);
}

Values attention_weight_in(const AttentionShape& shape, std::uint64_t seed) {
  return random_values(3 * hidden_of(shape), hidden_of(shape), seed, 1);
}

Values attention_weight_out(const AttentionShape& shape, std::uint64_t seed) {
  return random_values(hidden_of(shape), hidden_of(shape), seed, 2);
}

void attend(const AttentionShape& shape, std::int64_t heads, const Values& qkv, std::int64_t first,
            std::int64_t count, Values& out) {
  const std::int64_t size = shape.head_size;
  const std::int64_t qkv_cols = 3 * heads * size;
  std::vector<float> weights(static_cast<std::size_t>(shape.tokens));
  for (std::int64_t head = 0; head < heads; ++head) {
    const float* of_head = qkv.data() + 3 * head * size;
    for (std::int64_t i = first; i < first + count; ++i) {
      attend_query(of_head + i * qkv_cols, of_head + size, of_head + 2 * size, qkv_cols, size, weights,
                   out.data() + (i * heads + head) * size);
    }
  }
}

double attention_error(const AttentionShape& shape, std::uint64_t seed, std::int64_t num_tokens,
                       const std::function<std::int64_t(std::int64_t)>& token_of, const Values& out) {
  const std::int64_t hidden = hidden_of(shape);
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> queries;
  for (std::int64_t i = 0; i < num_tokens; i += sample_step(num_tokens)) {
    rows.push_back(i);
    queries.push_back(token_of(i));
  }
  const Values tokens = attention_tokens(shape, seed);
  const Values weight_in = attention_weight_in(shape, seed);
  const Values weight_out = attention_weight_out(shape, seed);
  std::vector<double> attended;
  attended.resize(queries.size() * static_cast<std::size_t>(hidden));
  for (std::int64_t head = 0; head < shape.heads; ++head) {
    attend_exactly(shape, tokens, weight_in, head, queries, attended);
  }
  LargestError largest;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    for (std::int64_t j = 0; j < hidden; ++j) {
      double expected = 0;
      for (std::int64_t p = 0; p < hidden; ++p)
        expected += attended[i * static_cast<std::size_t>(hidden) + static_cast<std::size_t>(p)] *
                    at(weight_out, hidden, j, p);
      largest.add(at(out, hidden, rows[i], j), expected);
    }
  }
  return largest.share();
}

double largest_attention_error(const AttentionShape& shape) {
  return kRounding * static_cast<double>(2 * hidden_of(shape) + shape.tokens + shape.head_size);
}

}  // namespace flashoverlap::layers

#pragma once

#include <cstdint>
#include <functional>

#include "layer.h"

/// What attention has in common however it is spread over ranks. With x [tokens, hidden], hidden = heads *
/// head_size: out = attention(x · qkv_weight^T) · out_weight^T. Rows [3 h s, 3 (h + 1) s) of the QKV weight
/// are q, k and v of head h, columns [h s, (h + 1) s) of the output weight take its result.
namespace flashoverlap::layers {

[[nodiscard]] inline std::int64_t hidden_of(const AttentionShape& shape) {
  return shape.heads * shape.head_size;
}

Values attention_tokens(const AttentionShape& shape, std::uint64_t seed);      ///< [tokens, hidden]
Values attention_weight_in(const AttentionShape& shape, std::uint64_t seed);   ///< [3 * hidden, hidden]
Values attention_weight_out(const AttentionShape& shape, std::uint64_t seed);  ///< [hidden, hidden]

/// softmax(q · k^T / sqrt(head_size)) · v of `heads` heads side by side, for the queries [first, first +
/// count) over all tokens, without a mask. qkv: [tokens, 3 * heads * head_size]; out: [tokens, heads *
/// head_size], of which the queries' rows are written.
void attend(const AttentionShape& shape, std::int64_t heads, const Values& qkv, std::int64_t first,
            std::int64_t count, Values& out);

/// How far `out`, [tokens of this rank, hidden], is from these tokens of the whole layer in float64: as
/// Layer::error. `token_of(i)` is the one in row i.
double attention_error(const AttentionShape& shape, std::uint64_t seed, std::int64_t num_tokens,
                       const std::function<std::int64_t(std::int64_t)>& token_of, const Values& out);
/// What it may be.
double largest_attention_error(const AttentionShape& shape);

}  // namespace flashoverlap::layers

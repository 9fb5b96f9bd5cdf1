#pragma once

#include <cstdint>
#include <functional>

#include "layer.h"
#include "values.h"

/// What attention has in common however it is spread over ranks. With x [tokens, hidden], hidden = heads *
/// head_size: out = attention(x · qkv_weight^T) · out_weight^T. Rows [3 h s, 3 (h + 1) s) of the QKV weight
/// are q, k and v of head h, columns [h s, (h + 1) s) of the output weight take its result.
namespace flashoverlap::layers {

[[nodiscard]] inline std::int64_t hidden_of(const AttentionShape& shape) {
  return shape.heads * shape.head_size;
}

/// The whole layer's matrices, as values of one element type.
struct AttentionValues {
  AttentionValues(const AttentionShape& shape, DType dtype, std::uint64_t seed);

  AttentionShape shape;
  DType dtype;
  SharedValues tokens;      ///< [tokens, hidden]
  SharedValues weight_in;   ///< [3 * hidden, hidden]
  SharedValues weight_out;  ///< [hidden, hidden]
};

/// How far `out`, [tokens of this rank, hidden], is from these tokens of the whole layer in float64: as
/// Layer::error. `token_of(i)` is the one in row i.
double attention_error(const AttentionValues& values,
                       const std::function<std::int64_t(std::int64_t)>& token_of, const Matrix& out);
/// What it may be. `roundings`: how often results are stored behind attention; see largest_share.
double largest_attention_error(const AttentionValues& values, int roundings);

}  // namespace flashoverlap::layers

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "layer.h"

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

/// Query `first` goes to row 0 of `out`.
void attend(const AttentionShape& shape, const float* qkv, std::int64_t first, std::int64_t count,
            float* out) {
  const std::int64_t size = shape.head_size;
  const std::int64_t qkv_cols = 3 * shape.heads * size;
  std::vector<float> weights(static_cast<std::size_t>(shape.tokens));
  for (std::int64_t head = 0; head < shape.heads; ++head) {
    const float* of_head = qkv + 3 * head * size;
    for (std::int64_t i = 0; i < count; ++i) {
      attend_query(of_head + (first + i) * qkv_cols, of_head + size, of_head + 2 * size, qkv_cols, size,
                   weights, out + (i * shape.heads + head) * size);
    }
  }
}

class HostAttention final : public Attention {
 public:
  HostAttention(const AttentionShape& own, const Matrix& qkv, const Matrix& out)
      : own_(own), qkv_(qkv), out_(out) {}

  void run(std::int64_t first, std::int64_t count) override {
    if (qkv_.place().dtype() == DType::kFloat32) {
      return attend(own_, static_cast<const float*>(qkv_.data()), first, count,
                    static_cast<float*>(out_.data()) + first * out_.cols());
    }
    Values rows(static_cast<std::size_t>(count * out_.cols()));
    attend(own_, qkv_.read().data(), first, count, rows.data());
    out_.write_rows(first, rows);
  }

 private:
  AttentionShape own_;
  const Matrix& qkv_;
  const Matrix& out_;
};

}  // namespace

std::shared_ptr<void> HostPlace::allocate(std::int64_t bytes) {
  const auto memory = std::make_shared<std::vector<char>>(static_cast<std::size_t>(bytes));
  return {memory, memory->data()};
}

void HostPlace::write(void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void HostPlace::read(const void* from, void* to, std::int64_t bytes) {
  write(to, from, bytes);
}

void HostPlace::poison(void* to, std::int64_t bytes) {
  constexpr int kNaN = 0xFF;  // in every type
  if (bytes > 0) std::memset(to, kNaN, static_cast<std::size_t>(bytes));
}

std::unique_ptr<Attention> HostPlace::make_attention(const AttentionShape& own, const Matrix& qkv,
                                                     const Matrix& out) {
  return std::make_unique<HostAttention>(own, qkv, out);
}

}  // namespace flashoverlap::layers

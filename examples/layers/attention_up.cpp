#include <utility>

#include "values.h"

namespace flashoverlap::layers {
namespace {

/// out[tokens, size] = softmax(q · k^T / sqrt(size)) · v for one head. A row of `qkv` has q, k, v side by
/// side.
void attend(const float* qkv, std::int64_t qkv_cols, std::int64_t tokens, std::int64_t size, float* out,
            std::int64_t out_cols) {
  std::vector<float> weights(static_cast<std::size_t>(tokens));
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  for (std::int64_t i = 0; i < tokens; ++i) {
    const float* q = qkv + i * qkv_cols;
    float largest = -std::numeric_limits<float>::infinity();
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* k = qkv + t * qkv_cols + size;
      float sum = 0;
      for (std::int64_t p = 0; p < size; ++p) sum += q[p] * k[p];
      weights[static_cast<std::size_t>(t)] = sum * scale;
      largest = std::max(largest, sum * scale);
    }
    float total = 0;
    for (float& weight : weights) total += weight = std::exp(weight - largest);
    float* to = out + i * out_cols;
    std::fill_n(to, size, 0.0F);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* v = qkv + t * qkv_cols + 2 * size;
      const float weight = weights[static_cast<std::size_t>(t)] / total;
      for (std::int64_t p = 0; p < size; ++p) to[p] += weight * v[p];
    }
  }
}

class AttentionUp final : public Layer {
 public:
  AttentionUp(Context& context, const AttentionShape& shape, std::uint64_t seed)
      : shape_(shape),
        ranks_(context.communicator().size()),
        rank_(static_cast<std::size_t>(context.communicator().rank())),
        seed_(seed),
        hidden_(shape.heads * shape.head_size),
        head_begins_(slice_begins({}, shape.heads, ranks_)),
        project_in_(context, {.m = shape.tokens, .n = 3 * hidden_, .k = hidden_},
                    slices_of_heads(3 * shape.head_size)),
        project_out_(context, {.m = shape.tokens, .n = hidden_, .k = hidden_},
                     slices_of_heads(shape.head_size)),
        tokens_(own_tokens()),
        weight_in_(whole_weight_in()),
        weight_out_(whole_weight_out()),
        qkv_(missing_values(shape.tokens * qkv_cols())),
        attended_(missing_values(shape.tokens * project_out_.num_columns())),
        out_(missing_values(project_out_.output_rows() * hidden_)) {}

  void run(Method method, Mode mode, Timeline* timeline) override {
    project_in_.run(operands(tokens_, hidden_, weight_in_, hidden_, qkv_, qkv_cols()), method, mode,
                    timeline);
    if (mode != Mode::kCommunicationOnly) attend_own_heads();
    project_out_.run(operands(attended_, project_out_.num_columns(), weight_out_, hidden_, out_, hidden_),
                     method, mode, timeline);
  }

  [[nodiscard]] Values output() const override { return out_; }

  void poison() override {
    make_missing(qkv_);
    make_missing(attended_);
    make_missing(out_);
  }

  [[nodiscard]] double error() const override {
    const std::int64_t rows = project_out_.output_rows();
    std::vector<std::int64_t> sample;
    for (std::int64_t i = 0; i < rows; i += sample_step(rows)) sample.push_back(i);
    const Values all = random_values(shape_.tokens, hidden_, seed_, 0);
    // What attention gives for the sample, [sample, hidden].
    std::vector<double> attended;
    attended.resize(sample.size() * static_cast<std::size_t>(hidden_));
    for (std::int64_t head = 0; head < shape_.heads; ++head) attend_exactly(all, head, sample, attended);
    LargestError largest;
    for (std::size_t i = 0; i < sample.size(); ++i) {
      for (std::int64_t j = 0; j < hidden_; ++j) {
        double expected = 0;
        for (std::int64_t p = 0; p < hidden_; ++p)
          expected += attended[i * static_cast<std::size_t>(hidden_) + static_cast<std::size_t>(p)] *
                      at(weight_out_, hidden_, j, p);
        largest.add(at(out_, hidden_, sample[i], j), expected);
      }
    }
    return largest.share();
  }
  [[nodiscard]] double largest_error() const override {
    return kRounding * static_cast<double>(2 * hidden_ + shape_.tokens + shape_.head_size);
  }

  [[nodiscard]] double bytes_sent() const override {
    // The other heads' columns of own tokens, and the other tokens' rows of own heads.
    const std::int64_t own = project_out_.output_rows();
    const std::int64_t to_heads = own * (3 * hidden_ - qkv_cols());
    const std::int64_t to_tokens = (shape_.tokens - own) * project_out_.num_columns();
    return static_cast<double>(to_heads + to_tokens) * sizeof(float);
  }

 private:
  [[nodiscard]] std::int64_t num_heads(std::size_t rank) const {
    return head_begins_[rank + 1] - head_begins_[rank];
  }
  [[nodiscard]] std::int64_t qkv_cols() const { return 3 * project_out_.num_columns(); }

  /// `width` columns for each head.
  [[nodiscard]] HeadSlices slices_of_heads(std::int64_t width) const {
    HeadSlices slices;
    for (std::size_t rank = 0; rank + 1 < head_begins_.size(); ++rank)
      slices.columns.sizes.push_back(num_heads(rank) * width);
    return slices;
  }

  void attend_own_heads() {
    const std::int64_t size = shape_.head_size;
    for (std::int64_t head = 0; head < num_heads(rank_); ++head) {
      attend(qkv_.data() + 3 * head * size, qkv_cols(), shape_.tokens, size, attended_.data() + head * size,
             project_out_.num_columns());
    }
  }

  /// One head's output for the sample's tokens of this rank, in float64.
  void attend_exactly(const Values& all, std::int64_t head, const std::vector<std::int64_t>& sample,
                      std::vector<double>& attended) const {
    const std::int64_t size = shape_.head_size;
    const std::int64_t row = 3 * head * size;  // of the QKV weight
    std::vector<double> k;
    std::vector<double> v;
    for (std::int64_t t = 0; t < shape_.tokens; ++t) {
      for (std::int64_t p = 0; p < size; ++p) {
        k.push_back(dot(all, t, weight_in_, row + size + p, hidden_));
        v.push_back(dot(all, t, weight_in_, row + 2 * size + p, hidden_));
      }
    }
    for (std::size_t i = 0; i < sample.size(); ++i) {
      std::vector<double> weights;
      double total = 0;
      std::vector<double> q;
      for (std::int64_t p = 0; p < size; ++p)
        q.push_back(dot(all, project_out_.first_row() + sample[i], weight_in_, row + p, hidden_));
      for (std::size_t t = 0; t < static_cast<std::size_t>(shape_.tokens); ++t) {
        double sum = 0;
        for (std::size_t p = 0; p < q.size(); ++p) sum += q[p] * k[t * q.size() + p];
        weights.push_back(std::exp(sum / std::sqrt(static_cast<double>(size))));
        total += weights.back();
      }
      double* to = attended.data() + i * static_cast<std::size_t>(hidden_) + head * size;
      for (std::size_t t = 0; t < weights.size(); ++t) {
        for (std::size_t p = 0; p < q.size(); ++p) to[p] += weights[t] / total * v[t * q.size() + p];
      }
    }
  }

  [[nodiscard]] Values own_tokens() const {
    const Values all = random_values(shape_.tokens, hidden_, seed_, 0);
    const std::int64_t begin = project_out_.first_row() * hidden_;
    return {all.begin() + begin, all.begin() + begin + project_out_.output_rows() * hidden_};
  }
  [[nodiscard]] Values whole_weight_in() const { return random_values(3 * hidden_, hidden_, seed_, 1); }
  [[nodiscard]] Values whole_weight_out() const { return random_values(hidden_, hidden_, seed_, 2); }

  AttentionShape shape_;
  int ranks_;
  std::size_t rank_;
  std::uint64_t seed_;
  std::int64_t hidden_;
  std::vector<std::int64_t> head_begins_;
  GemmAllToAll project_in_;
  AllToAllGemm project_out_;
  Values tokens_;
  Values weight_in_;
  Values weight_out_;
  Values qkv_;
  Values attended_;
  Values out_;
};

}  // namespace

std::unique_ptr<Layer> make_attention_up(Context& context, const AttentionShape& shape, std::uint64_t seed) {
  return std::make_unique<AttentionUp>(context, shape, seed);
}

}  // namespace flashoverlap::layers

#include "attention.h"

namespace flashoverlap::layers {
namespace {

class AttentionUp final : public Layer {
 public:
  AttentionUp(Place& place, const AttentionShape& shape, std::uint64_t seed)
      : place_(place),
        shape_(shape),
        hidden_(hidden_of(shape)),
        head_begins_(slice_begins({}, shape.heads, place.num_ranks())),
        own_{.tokens = shape.tokens,
             .heads = num_heads(static_cast<std::size_t>(place.rank())),
             .head_size = shape.head_size},
        project_in_(place.context(), gemm_options(place, shape.tokens, 3 * hidden_, hidden_),
                    slices_of_heads(3 * shape.head_size)),
        project_out_(place.context(), gemm_options(place, shape.tokens, hidden_, hidden_),
                     slices_of_heads(shape.head_size)),
        values_(shape, place.dtype(), seed),
        tokens_(place, project_out_.output_rows(), hidden_,
                rows_of(*values_.tokens, hidden_, project_out_.first_row(), project_out_.output_rows())),
        weight_in_(place, 3 * hidden_, hidden_, *values_.weight_in),
        weight_out_(place, hidden_, hidden_, *values_.weight_out),
        qkv_(place, shape.tokens, 3 * hidden_of(own_)),
        attended_(place, shape.tokens, hidden_of(own_)),
        out_(place, project_out_.output_rows(), hidden_),
        attention_(place.make_attention(own_, qkv_, attended_)) {}

  void run(Method method, Mode mode, Timeline* timeline) override {
    project_in_.run(operands(tokens_, weight_in_, qkv_), method, mode, timeline);
    if (mode != Mode::kCommunicationOnly) attention_->run(0, shape_.tokens);
    project_out_.run(operands(attended_, weight_out_, out_), method, mode, timeline);
  }

  [[nodiscard]] Values output() const override { return out_.read(); }

  void poison() override {
    qkv_.poison();
    attended_.poison();
    out_.poison();
  }

  [[nodiscard]] double error(Method /*last*/) const override {
    return attention_error(
        values_, [this](std::int64_t i) { return project_out_.first_row() + i; }, out_);
  }
  [[nodiscard]] double largest_error() const override {
    return largest_attention_error(values_, 1);  // the result; there is no sum over ranks
  }

  [[nodiscard]] double bytes_sent() const override {
    // The other heads' columns of own tokens, and the other tokens' rows of own heads.
    const std::int64_t to_heads = tokens_.rows() * (3 * hidden_ - qkv_.cols());
    const std::int64_t to_tokens = (shape_.tokens - tokens_.rows()) * attended_.cols();
    return static_cast<double>((to_heads + to_tokens) * size_of(place_.dtype()));
  }

 private:
  [[nodiscard]] std::int64_t num_heads(std::size_t rank) const {
    return head_begins_[rank + 1] - head_begins_[rank];
  }

  /// `width` columns for each head.
  [[nodiscard]] HeadSlices slices_of_heads(std::int64_t width) const {
    HeadSlices slices;
    for (std::size_t rank = 0; rank + 1 < head_begins_.size(); ++rank)
      slices.columns.sizes.push_back(num_heads(rank) * width);
    return slices;
  }

  Place& place_;
  AttentionShape shape_;
  std::int64_t hidden_;
  std::vector<std::int64_t> head_begins_;
  AttentionShape own_;  // of this rank's heads
  GemmAllToAll project_in_;
  AllToAllGemm project_out_;
  AttentionValues values_;
  Matrix tokens_;
  Matrix weight_in_;
  Matrix weight_out_;
  Matrix qkv_;
  Matrix attended_;
  Matrix out_;
  std::unique_ptr<Attention> attention_;
};

}  // namespace

std::unique_ptr<Layer> make_attention_up(Place& place, const AttentionShape& shape, std::uint64_t seed) {
  return std::make_unique<AttentionUp>(place, shape, seed);
}

}  // namespace flashoverlap::layers

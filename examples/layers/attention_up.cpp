#include <utility>

#include "attention.h"
#include "values.h"

namespace flashoverlap::layers {
namespace {

class AttentionUp final : public Layer {
 public:
  AttentionUp(Context& context, const AttentionShape& shape, std::uint64_t seed)
      : shape_(shape),
        ranks_(context.communicator().size()),
        rank_(static_cast<std::size_t>(context.communicator().rank())),
        seed_(seed),
        hidden_(hidden_of(shape)),
        head_begins_(slice_begins({}, shape.heads, ranks_)),
        project_in_(context, {.m = shape.tokens, .n = 3 * hidden_, .k = hidden_},
                    slices_of_heads(3 * shape.head_size)),
        project_out_(context, {.m = shape.tokens, .n = hidden_, .k = hidden_},
                     slices_of_heads(shape.head_size)),
        tokens_(own_tokens()),
        weight_in_(attention_weight_in(shape, seed)),
        weight_out_(attention_weight_out(shape, seed)),
        qkv_(missing_values(shape.tokens * qkv_cols())),
        attended_(missing_values(shape.tokens * project_out_.num_columns())),
        out_(missing_values(project_out_.output_rows() * hidden_)) {}

  void run(Method method, Mode mode, Timeline* timeline) override {
    project_in_.run(operands(tokens_, hidden_, weight_in_, hidden_, qkv_, qkv_cols()), method, mode,
                    timeline);
    if (mode != Mode::kCommunicationOnly) {
      attend(shape_, num_heads(rank_), qkv_, 0, shape_.tokens, attended_);
    }
    project_out_.run(operands(attended_, project_out_.num_columns(), weight_out_, hidden_, out_, hidden_),
                     method, mode, timeline);
  }

  [[nodiscard]] Values output() const override { return out_; }

  void poison() override {
    make_missing(qkv_);
    make_missing(attended_);
    make_missing(out_);
  }

  [[nodiscard]] double error(Method /*last*/) const override {
    return attention_error(
        shape_, seed_, project_out_.output_rows(),
        [this](std::int64_t i) { return project_out_.first_row() + i; }, out_);
  }
  [[nodiscard]] double largest_error() const override { return largest_attention_error(shape_); }

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

  [[nodiscard]] Values own_tokens() const {
    const Values all = attention_tokens(shape_, seed_);
    const std::int64_t begin = project_out_.first_row() * hidden_;
    return {all.begin() + begin, all.begin() + begin + project_out_.output_rows() * hidden_};
  }

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

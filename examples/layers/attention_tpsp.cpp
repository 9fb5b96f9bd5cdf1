#include <string>
#include <utility>

#include "attention.h"
#include "gathered_rows.h"
#include "values.h"

namespace flashoverlap::layers {
namespace {

std::int64_t heads_of_each(const AttentionShape& shape, int ranks) {
  if (shape.heads % ranks == 0) return shape.heads / ranks;
  throw Error(ErrorKind::kBadArgument, "heads is " + std::to_string(shape.heads) +
                                           "; it must be a multiple of the " + std::to_string(ranks) +
                                           " ranks");
}

class AttentionTpsp final : public Layer {
 public:
  AttentionTpsp(Context& context, const AttentionShape& shape, std::uint64_t seed,
                const BaselineOptions& baseline)
      : shape_(shape),
        ranks_(context.communicator().size()),
        seed_(seed),
        heads_(heads_of_each(shape, ranks_)),
        hidden_(hidden_of(shape)),
        own_cols_(heads_ * shape.head_size),
        project_in_(context, {.m = shape.tokens, .n = 3 * own_cols_, .k = hidden_}, {}, baseline),
        project_out_(context, {.m = shape.tokens, .n = hidden_, .k = own_cols_}, OverlapMethod::kTailFree, {},
                     baseline),
        tokens_(attention_tokens(shape, seed), hidden_, project_in_.first_row(), project_in_.num_rows(),
                order_in_slices(shape.tokens, ranks_, project_in_.plan().grid.tile_m(), baseline.num_slices)),
        weight_in_(own_weight_in(context.communicator().rank())),
        weight_out_(own_weight_out(context.communicator().rank())),
        qkv_(missing_values(shape.tokens * 3 * own_cols_)),
        attended_(missing_values(shape.tokens * own_cols_)),
        out_(missing_values(project_in_.num_rows() * hidden_)) {}

  void run(Method method, Mode mode, Timeline* timeline) override {
    project_in_.run(operands(tokens_.of(method), hidden_, weight_in_, hidden_, qkv_, 3 * own_cols_), method,
                    mode, timeline);
    Operands of_attended = operands(attended_, own_cols_, weight_out_, own_cols_, out_, hidden_);
    // By queries, as the schedule of the output projection comes to them.
    of_attended.make_rows = [this](std::int64_t first, std::int64_t count) {
      attend(shape_, heads_, qkv_, first, count, attended_);
    };
    project_out_.run(of_attended, method, mode, timeline);
  }

  [[nodiscard]] Values output() const override { return out_; }

  void poison() override {
    make_missing(qkv_);
    make_missing(attended_);
    make_missing(out_);
    tokens_.poison();
  }

  [[nodiscard]] double error(Method last) const override {
    return attention_error(
        shape_, seed_, project_in_.num_rows(),
        [&](std::int64_t i) { return tokens_.row(last, project_in_.first_row() + i); }, out_);
  }
  [[nodiscard]] bool has_sliced() const override { return tokens_.has_sliced(); }
  [[nodiscard]] double largest_error() const override { return largest_attention_error(shape_); }

  [[nodiscard]] double bytes_sent() const override {
    // Own tokens to all others; the others' partial sums to them.
    const std::int64_t rows = (ranks_ - 1) * project_in_.num_rows() + shape_.tokens - project_in_.num_rows();
    return static_cast<double>(rows * hidden_) * sizeof(float);
  }

 private:
  /// [3 * own columns, hidden]
  [[nodiscard]] Values own_weight_in(int rank) const {
    const Values whole = attention_weight_in(shape_, seed_);
    const std::int64_t begin = rank * 3 * own_cols_ * hidden_;
    return {whole.begin() + begin, whole.begin() + begin + 3 * own_cols_ * hidden_};
  }
  /// [hidden, own columns]
  [[nodiscard]] Values own_weight_out(int rank) const {
    const Values whole = attention_weight_out(shape_, seed_);
    Values own;
    for (std::int64_t row = 0; row < hidden_; ++row) {
      const auto begin = whole.begin() + row * hidden_ + rank * own_cols_;
      own.insert(own.end(), begin, begin + own_cols_);
    }
    return own;
  }

  AttentionShape shape_;
  int ranks_;
  std::uint64_t seed_;
  std::int64_t heads_;  // of this rank
  std::int64_t hidden_;
  std::int64_t own_cols_;
  AllGatherGemm project_in_;
  GemmReduceScatter project_out_;
  GatheredRows tokens_;
  Values weight_in_;
  Values weight_out_;
  Values qkv_;
  Values attended_;
  Values out_;
};

}  // namespace

std::unique_ptr<Layer> make_attention_tpsp(Context& context, const AttentionShape& shape, std::uint64_t seed,
                                           const BaselineOptions& baseline) {
  return std::make_unique<AttentionTpsp>(context, shape, seed, baseline);
}

}  // namespace flashoverlap::layers

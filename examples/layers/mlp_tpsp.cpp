#include <utility>

#include "gathered_rows.h"
#include "values.h"

namespace flashoverlap::layers {
namespace {

class MlpTpsp final : public Layer {
 public:
  MlpTpsp(Context& context, const MlpShape& shape, std::uint64_t seed, const BaselineOptions& baseline)
      : shape_(shape),
        ranks_(context.communicator().size()),
        seed_(seed),
        inner_cols_(shape.inner / ranks_),
        up_(context, {.m = shape.tokens, .n = inner_cols_, .k = shape.hidden}, {}, baseline),
        down_(context, {.m = shape.tokens, .n = shape.hidden, .k = inner_cols_}, OverlapMethod::kTailFree, {},
              baseline),
        tokens_(all_tokens(), shape.hidden, up_.first_row(), up_.num_rows(),
                order_in_slices(shape.tokens, ranks_, up_.plan().grid.tile_m(), baseline.num_slices)),
        up_weight_(up_weight(context.communicator().rank())),
        down_weight_(down_weight(context.communicator().rank())),
        inner_(missing_values(shape.tokens * inner_cols_)),
        out_(missing_values(up_.num_rows() * shape.hidden)) {}

  void run(Method method, Mode mode, Timeline* timeline) override {
    Operands first =
        operands(tokens_.of(method), shape_.hidden, up_weight_, shape_.hidden, inner_, inner_cols_);
    first.epilogue.activation = Activation::kSilu;
    up_.run(first, method, mode, timeline);
    down_.run(operands(inner_, inner_cols_, down_weight_, inner_cols_, out_, shape_.hidden), method, mode,
              timeline);
  }

  [[nodiscard]] Values output() const override { return out_; }

  void poison() override {
    make_missing(inner_);
    make_missing(out_);
    tokens_.poison();
  }

  [[nodiscard]] double error(Method last) const override {
    std::vector<Values> up;
    std::vector<Values> down;
    for (int rank = 0; rank < ranks_; ++rank) {
      up.push_back(up_weight(rank));
      down.push_back(down_weight(rank));
    }
    LargestError largest;
    for (std::int64_t i = 0; i < up_.num_rows(); i += sample_step(up_.num_rows())) {
      const std::int64_t token = tokens_.row(last, up_.first_row() + i);
      std::vector<double> sums(static_cast<std::size_t>(shape_.hidden), 0.0);
      for (std::size_t rank = 0; rank < up.size(); ++rank) {
        for (std::int64_t p = 0; p < inner_cols_; ++p) {
          const double x = dot(tokens_.whole(), token, up[rank], p, shape_.hidden);
          const double inner = x / (1 + std::exp(-x));
          for (std::int64_t j = 0; j < shape_.hidden; ++j)
            sums[static_cast<std::size_t>(j)] += inner * at(down[rank], inner_cols_, j, p);
        }
      }
      for (std::int64_t j = 0; j < shape_.hidden; ++j)
        largest.add(at(out_, shape_.hidden, i, j), sums[static_cast<std::size_t>(j)]);
    }
    return largest.share();
  }
  [[nodiscard]] double largest_error() const override {
    return kRounding * static_cast<double>(shape_.hidden + shape_.inner);
  }

  [[nodiscard]] bool has_sliced() const override { return tokens_.has_sliced(); }

  [[nodiscard]] double bytes_sent() const override {
    // Own tokens to all others; the others' partial sums to them.
    const std::int64_t rows = (ranks_ - 1) * up_.num_rows() + shape_.tokens - up_.num_rows();
    return static_cast<double>(rows * shape_.hidden) * sizeof(float);
  }

 private:
  [[nodiscard]] Values all_tokens() const { return random_values(shape_.tokens, shape_.hidden, seed_, 0); }
  [[nodiscard]] Values up_weight(int rank) const {
    return random_values(inner_cols_, shape_.hidden, seed_, 1 + 2 * static_cast<std::uint64_t>(rank));
  }
  [[nodiscard]] Values down_weight(int rank) const {
    return random_values(shape_.hidden, inner_cols_, seed_, 2 + 2 * static_cast<std::uint64_t>(rank));
  }

  MlpShape shape_;
  int ranks_;
  std::uint64_t seed_;
  std::int64_t inner_cols_;
  AllGatherGemm up_;
  GemmReduceScatter down_;
  GatheredRows tokens_;
  Values up_weight_;
  Values down_weight_;
  Values inner_;
  Values out_;
};

}  // namespace

std::unique_ptr<Layer> make_mlp_tpsp(Context& context, const MlpShape& shape, std::uint64_t seed,
                                     const BaselineOptions& baseline) {
  return std::make_unique<MlpTpsp>(context, shape, seed, baseline);
}

}  // namespace flashoverlap::layers

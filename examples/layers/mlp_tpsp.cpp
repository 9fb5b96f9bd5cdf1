#include "gathered_rows.h"
#include "layer.h"

namespace flashoverlap::layers {
namespace {

class MlpTpsp final : public Layer {
 public:
  MlpTpsp(Place& place, const MlpShape& shape, std::uint64_t seed, const BaselineOptions& baseline)
      : place_(place),
        shape_(shape),
        ranks_(place.num_ranks()),
        seed_(seed),
        inner_cols_(shape.inner / ranks_),
        up_(place.context(), gemm_options(place, shape.tokens, inner_cols_, shape.hidden), {}, baseline),
        down_(place.context(), gemm_options(place, shape.tokens, shape.hidden, inner_cols_),
              OverlapMethod::kTailFree, {}, baseline),
        tokens_(place, all_tokens(), shape.hidden, up_.first_row(), up_.num_rows(),
                order_in_slices(shape.tokens, ranks_, up_.plan().grid.tile_m(), baseline.num_slices)),
        up_values_(up_weight(place.rank())),
        down_values_(down_weight(place.rank())),
        up_weight_(place, inner_cols_, shape.hidden, *up_values_),
        down_weight_(place, shape.hidden, inner_cols_, *down_values_),
        inner_(place, shape.tokens, inner_cols_),
        out_(place, up_.num_rows(), shape.hidden) {}

  void run(Method method, Mode mode, Timeline* timeline) override {
    Operands first = operands(tokens_.of(method), up_weight_, inner_);
    first.epilogue.activation = Activation::kSilu;
    up_.run(first, method, mode, timeline);
    down_.run(operands(inner_, down_weight_, out_), method, mode, timeline);
  }

  [[nodiscard]] Values output() const override { return out_.read(); }

  void poison() override {
    inner_.poison();
    out_.poison();
    tokens_.poison();
  }

  [[nodiscard]] double error(Method last) const override {
    std::vector<SharedValues> up;
    std::vector<SharedValues> down;
    for (int rank = 0; rank < ranks_; ++rank) {
      up.push_back(up_weight(rank));
      down.push_back(down_weight(rank));
    }
    const Values out = out_.read();
    LargestError largest;
    for (const std::int64_t i : sample_rows(up_.num_rows(), 2 * shape_.hidden * shape_.inner)) {
      const float* const token =
          row_of(tokens_.whole(), shape_.hidden, tokens_.row(last, up_.first_row() + i));
      std::vector<double> sums(static_cast<std::size_t>(shape_.hidden), 0.0);
      for (std::size_t rank = 0; rank < up.size(); ++rank) add_part(token, *up[rank], *down[rank], sums);
      const float* const actual = row_of(out, shape_.hidden, i);
      for (std::size_t j = 0; j < sums.size(); ++j) largest.add(static_cast<double>(actual[j]), sums[j]);
    }
    return largest.share();
  }

  [[nodiscard]] double largest_error() const override {
    // Stored: what goes into the activation, what comes out, and the sum over ranks.
    return largest_share(place_.dtype(), shape_.hidden + shape_.inner, 2 + roundings_of_sum(ranks_));
  }

  [[nodiscard]] bool has_sliced() const override { return tokens_.has_sliced(); }

  [[nodiscard]] double bytes_sent() const override {
    // Own tokens to all others; the others' partial sums to them.
    const std::int64_t rows = (ranks_ - 1) * up_.num_rows() + shape_.tokens - up_.num_rows();
    return static_cast<double>(rows * shape_.hidden * size_of(place_.dtype()));
  }

 private:
  [[nodiscard]] SharedValues all_tokens() const {
    return random_tokens(shape_.tokens, shape_.hidden, place_.dtype(), seed_, 0);
  }
  [[nodiscard]] SharedValues up_weight(int rank) const {
    const auto number = 1 + 2 * static_cast<std::uint64_t>(rank);
    return random_weight(inner_cols_, shape_.hidden, place_.dtype(), seed_, number);
  }
  [[nodiscard]] SharedValues down_weight(int rank) const {
    const auto number = 2 + 2 * static_cast<std::uint64_t>(rank);
    return random_weight(shape_.hidden, inner_cols_, place_.dtype(), seed_, number);
  }

  /// One rank's part of a token's sums.
  void add_part(const float* token, const Values& up, const Values& down, std::vector<double>& sums) const {
    std::vector<double> inner;
    for (std::int64_t p = 0; p < inner_cols_; ++p) {
      const double x = dot(token, row_of(up, shape_.hidden, p), shape_.hidden);
      inner.push_back(x / (1 + std::exp(-x)));
    }
    for (std::int64_t j = 0; j < shape_.hidden; ++j)
      sums[static_cast<std::size_t>(j)] += dot(inner.data(), row_of(down, inner_cols_, j), inner_cols_);
  }

  Place& place_;
  MlpShape shape_;
  int ranks_;
  std::uint64_t seed_;
  std::int64_t inner_cols_;
  AllGatherGemm up_;
  GemmReduceScatter down_;
  GatheredRows tokens_;
  SharedValues up_values_;  // kept for the other ranks' checks
  SharedValues down_values_;
  Matrix up_weight_;
  Matrix down_weight_;
  Matrix inner_;
  Matrix out_;
};

}  // namespace

std::unique_ptr<Layer> make_mlp_tpsp(Place& place, const MlpShape& shape, std::uint64_t seed,
                                     const BaselineOptions& baseline) {
  return std::make_unique<MlpTpsp>(place, shape, seed, baseline);
}

}  // namespace flashoverlap::layers

#include "gathered_rows.h"
#include "layer.h"

namespace flashoverlap::layers {
namespace {

class LinearDp final : public Layer {
 public:
  LinearDp(Place& place, const LinearShape& shape, std::uint64_t seed, const BaselineOptions& baseline)
      : place_(place),
        shape_(shape),
        ranks_(place.num_ranks()),
        seed_(seed),
        forward_(place.context(), gemm_options(place, shape.samples, shape.out, shape.in), {}, baseline),
        backward_(place.context(), gemm_options(place, shape.out, shape.in, shape.samples), {}, baseline),
        x_values_(samples(place.rank())),
        dy_values_(gradients(place.rank())),
        x_(place, shape.samples, shape.in, *x_values_),
        x_transposed_(place, shape.in, shape.samples, transposed(*x_values_, shape.samples, shape.in)),
        dy_transposed_(place, shape.out, shape.samples, transposed(*dy_values_, shape.samples, shape.out)),
        weight_(place, random_weight(shape.out, shape.in, place.dtype(), seed, 0), shape.in,
                forward_.first_row(), forward_.num_rows(),
                order_in_slices(shape.out, ranks_, forward_.plan().grid.tile_n(), baseline.num_slices)),
        y_(place, shape.samples, shape.out),
        dweight_(place, backward_.output_rows(), shape.in) {}

  void run(Method method, Mode mode, Timeline* timeline) override {
    forward_.run(operands(x_, weight_.of(method), y_), method, mode, timeline);
    backward_.run(operands(dy_transposed_, x_transposed_, dweight_), method, mode, timeline);
  }

  [[nodiscard]] Values output() const override {
    Values both = y_.read();
    const Values dweight = dweight_.read();
    both.insert(both.end(), dweight.begin(), dweight.end());
    return both;
  }

  void poison() override {
    y_.poison();
    dweight_.poison();
    weight_.poison();
  }

  [[nodiscard]] double error(Method last) const override {
    return std::max(forward_error(last), backward_error());
  }
  [[nodiscard]] bool has_sliced() const override { return weight_.has_sliced(); }
  [[nodiscard]] double largest_error() const override {
    // Stored: the sum over ranks; forward there is only the result.
    return largest_share(place_.dtype(), std::max(shape_.in, ranks_ * shape_.samples),
                         roundings_of_sum(ranks_));
  }

  [[nodiscard]] double bytes_sent() const override {
    // Own rows of the weight to all others; the others' rows of the gradient to them.
    const std::int64_t rows = (ranks_ - 1) * forward_.num_rows() + shape_.out - forward_.num_rows();
    return static_cast<double>(rows * shape_.in * size_of(place_.dtype()));
  }

 private:
  [[nodiscard]] double forward_error(Method last) const {
    const Values y = y_.read();
    LargestError largest;
    for (const std::int64_t i : sample_rows(shape_.samples, shape_.out * shape_.in)) {
      const float* const x = row_of(*x_values_, shape_.in, i);
      const float* const actual = row_of(y, shape_.out, i);
      for (std::int64_t j = 0; j < shape_.out; ++j) {
        largest.add(static_cast<double>(actual[j]),
                    dot(x, row_of(weight_.whole(), shape_.in, weight_.row(last, j)), shape_.in));
      }
    }
    return largest.share();
  }

  [[nodiscard]] double backward_error() const {
    std::vector<SharedValues> x;
    std::vector<SharedValues> dy;
    for (int rank = 0; rank < ranks_; ++rank) {
      x.push_back(samples(rank));
      dy.push_back(gradients(rank));
    }
    const Values dweight = dweight_.read();
    LargestError largest;
    for (const std::int64_t i : sample_rows(backward_.output_rows(), ranks_ * shape_.samples * shape_.in)) {
      std::vector<double> sums(static_cast<std::size_t>(shape_.in), 0.0);
      for (std::size_t rank = 0; rank < x.size(); ++rank) {
        for (std::int64_t s = 0; s < shape_.samples; ++s) {
          const float gradient = row_of(*dy[rank], shape_.out, s)[forward_.first_row() + i];
          add_scaled(static_cast<double>(gradient), row_of(*x[rank], shape_.in, s), shape_.in, sums.data());
        }
      }
      const float* const actual = row_of(dweight, shape_.in, i);
      for (std::size_t j = 0; j < sums.size(); ++j) largest.add(static_cast<double>(actual[j]), sums[j]);
    }
    return largest.share();
  }

  [[nodiscard]] SharedValues samples(int rank) const {
    const auto number = 1 + 2 * static_cast<std::uint64_t>(rank);
    return random_tokens(shape_.samples, shape_.in, place_.dtype(), seed_, number);
  }
  [[nodiscard]] SharedValues gradients(int rank) const {
    const auto number = 2 + 2 * static_cast<std::uint64_t>(rank);
    return random_tokens(shape_.samples, shape_.out, place_.dtype(), seed_, number);
  }

  Place& place_;
  LinearShape shape_;
  int ranks_;
  std::uint64_t seed_;
  ShardedWeightGemm forward_;
  GradientReduceScatter backward_;
  SharedValues x_values_;  // kept for the other ranks' checks
  SharedValues dy_values_;
  Matrix x_;
  Matrix x_transposed_;
  Matrix dy_transposed_;
  GatheredRows weight_;
  Matrix y_;
  Matrix dweight_;
};

}  // namespace

std::unique_ptr<Layer> make_linear_dp(Place& place, const LinearShape& shape, std::uint64_t seed,
                                      const BaselineOptions& baseline) {
  return std::make_unique<LinearDp>(place, shape, seed, baseline);
}

}  // namespace flashoverlap::layers

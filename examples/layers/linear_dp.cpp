#include "gathered_rows.h"
#include "values.h"

namespace flashoverlap::layers {
namespace {

Values transposed(const Values& matrix, std::int64_t rows, std::int64_t cols) {
  Values result;
  result.reserve(matrix.size());
  for (std::int64_t j = 0; j < cols; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) result.push_back(matrix[static_cast<std::size_t>(i * cols + j)]);
  }
  return result;
}

class LinearDp final : public Layer {
 public:
  LinearDp(Context& context, const LinearShape& shape, std::uint64_t seed, const BaselineOptions& baseline)
      : shape_(shape),
        ranks_(context.communicator().size()),
        seed_(seed),
        forward_(context, {.m = shape.samples, .n = shape.out, .k = shape.in}, {}, baseline),
        backward_(context, {.m = shape.out, .n = shape.in, .k = shape.samples}, {}, baseline),
        x_(samples(context.communicator().rank())),
        x_transposed_(transposed(x_, shape.samples, shape.in)),
        dy_transposed_(transposed(gradients(context.communicator().rank()), shape.samples, shape.out)),
        weight_(random_values(shape.out, shape.in, seed, 0), shape.in, forward_.first_row(),
                forward_.num_rows(),
                order_in_slices(shape.out, ranks_, forward_.plan().grid.tile_n(), baseline.num_slices)),
        y_(missing_values(shape.samples * shape.out)),
        dweight_(missing_values(backward_.output_rows() * shape.in)) {}

  void run(Method method, Mode mode, Timeline* timeline) override {
    forward_.run(operands(x_, shape_.in, weight_.of(method), shape_.in, y_, shape_.out), method, mode,
                 timeline);
    backward_.run(
        operands(dy_transposed_, shape_.samples, x_transposed_, shape_.samples, dweight_, shape_.in), method,
        mode, timeline);
  }

  [[nodiscard]] Values output() const override {
    Values both = y_;
    both.insert(both.end(), dweight_.begin(), dweight_.end());
    return both;
  }

  void poison() override {
    make_missing(y_);
    make_missing(dweight_);
    weight_.poison();
  }

  [[nodiscard]] double error(Method last) const override {
    return std::max(forward_error(last), backward_error());
  }
  [[nodiscard]] bool has_sliced() const override { return weight_.has_sliced(); }
  [[nodiscard]] double largest_error() const override {
    return kRounding * static_cast<double>(std::max(shape_.in, ranks_ * shape_.samples));
  }

  [[nodiscard]] double bytes_sent() const override {
    // Own rows of the weight to all others; the others' rows of the gradient to them.
    const std::int64_t rows = (ranks_ - 1) * forward_.num_rows() + shape_.out - forward_.num_rows();
    return static_cast<double>(rows * shape_.in) * sizeof(float);
  }

 private:
  [[nodiscard]] double forward_error(Method last) const {
    LargestError largest;
    for (std::int64_t i = 0; i < shape_.samples; i += sample_step(shape_.samples)) {
      for (std::int64_t j = 0; j < shape_.out; ++j)
        largest.add(at(y_, shape_.out, i, j), dot(x_, i, weight_.whole(), weight_.row(last, j), shape_.in));
    }
    return largest.share();
  }

  [[nodiscard]] double backward_error() const {
    std::vector<Values> x;
    std::vector<Values> dy;
    for (int rank = 0; rank < ranks_; ++rank) {
      x.push_back(samples(rank));
      dy.push_back(gradients(rank));
    }
    LargestError largest;
    for (std::int64_t i = 0; i < backward_.output_rows(); i += sample_step(backward_.output_rows())) {
      std::vector<double> sums(static_cast<std::size_t>(shape_.in), 0.0);
      for (std::size_t rank = 0; rank < x.size(); ++rank) {
        for (std::int64_t s = 0; s < shape_.samples; ++s) {
          const double gradient = at(dy[rank], shape_.out, s, forward_.first_row() + i);
          for (std::int64_t j = 0; j < shape_.in; ++j)
            sums[static_cast<std::size_t>(j)] += gradient * at(x[rank], shape_.in, s, j);
        }
      }
      for (std::int64_t j = 0; j < shape_.in; ++j)
        largest.add(at(dweight_, shape_.in, i, j), sums[static_cast<std::size_t>(j)]);
    }
    return largest.share();
  }

  [[nodiscard]] Values samples(int rank) const {
    return random_values(shape_.samples, shape_.in, seed_, 1 + 2 * static_cast<std::uint64_t>(rank));
  }
  [[nodiscard]] Values gradients(int rank) const {
    return random_values(shape_.samples, shape_.out, seed_, 2 + 2 * static_cast<std::uint64_t>(rank));
  }

  LinearShape shape_;
  int ranks_;
  std::uint64_t seed_;
  ShardedWeightGemm forward_;
  GradientReduceScatter backward_;
  Values x_;
  Values x_transposed_;
  Values dy_transposed_;
  GatheredRows weight_;
  Values y_;
  Values dweight_;
};

}  // namespace

std::unique_ptr<Layer> make_linear_dp(Context& context, const LinearShape& shape, std::uint64_t seed,
                                      const BaselineOptions& baseline) {
  return std::make_unique<LinearDp>(context, shape, seed, baseline);
}

}  // namespace flashoverlap::layers

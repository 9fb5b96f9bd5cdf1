#include "attention.h"

#include <string>

#include "gathered_rows.h"

namespace flashoverlap::layers {
namespace {

std::int64_t heads_of_each(const AttentionShape& shape, int ranks) {
  if (shape.heads % ranks == 0) return shape.heads / ranks;
  throw Error(ErrorKind::kBadArgument, "heads is " + std::to_string(shape.heads) +
                                           "; it must be a multiple of the " + std::to_string(ranks) +
                                           " ranks");
}

// The first own tiles must not wait for the whole of the last slice that arrives, which is why slices are
// sent in parts; here attention of the own queries comes before them, and that of fewer queries at a time
// takes longer.
const SliceOptions kWholeSlices{.sizes = {}, .parts = 1};

class AttentionTpsp final : public Layer {
 public:
  AttentionTpsp(Place& place, const AttentionShape& shape, std::uint64_t seed,
                const BaselineOptions& baseline)
      : place_(place),
        shape_(shape),
        ranks_(place.num_ranks()),
        hidden_(hidden_of(shape)),
        own_{.tokens = shape.tokens, .heads = heads_of_each(shape, ranks_), .head_size = shape.head_size},
        own_cols_(hidden_of(own_)),
        project_in_(place.context(), gemm_options(place, shape.tokens, 3 * own_cols_, hidden_), {}, baseline),
        project_out_(place.context(), gemm_options(place, shape.tokens, hidden_, own_cols_),
                     OverlapMethod::kTailFree, kWholeSlices, baseline),
        values_(shape, place.dtype(), seed),
        tokens_(place, values_.tokens, hidden_, project_in_.first_row(), project_in_.num_rows(),
                order_in_slices(shape.tokens, ranks_, project_in_.plan().grid.tile_m(), baseline.num_slices)),
        weight_in_(place, 3 * own_cols_, hidden_,
                   rows_of(*values_.weight_in, hidden_, place.rank() * 3 * own_cols_, 3 * own_cols_)),
        weight_out_(place, hidden_, own_cols_,
                    columns_of(*values_.weight_out, hidden_, place.rank() * own_cols_, own_cols_)),
        qkv_(place, shape.tokens, 3 * own_cols_),
        attended_(place, shape.tokens, own_cols_),
        out_(place, project_in_.num_rows(), hidden_),
        attention_(place.make_attention(own_, qkv_, attended_)) {}

  void run(Method method, Mode mode, Timeline* timeline) override {
    project_in_.run(operands(tokens_.of(method), weight_in_, qkv_), method, mode, timeline);
    Operands of_attended = operands(attended_, weight_out_, out_);
    if (place_.context().executor().makes_rows()) {
      // By queries, as the schedule of the output projection comes to them.
      of_attended.make_rows = [this](std::int64_t first, std::int64_t count) {
        attention_->run(first, count);
      };
    } else if (mode != Mode::kCommunicationOnly) {
      attention_->run(0, shape_.tokens);
    }
    project_out_.run(of_attended, method, mode, timeline);
  }

  [[nodiscard]] Values output() const override { return out_.read(); }

  void poison() override {
    qkv_.poison();
    attended_.poison();
    out_.poison();
    tokens_.poison();
  }

  [[nodiscard]] double error(Method last) const override {
    return attention_error(
        values_, [&](std::int64_t i) { return tokens_.row(last, project_in_.first_row() + i); }, out_);
  }
  [[nodiscard]] bool has_sliced() const override { return tokens_.has_sliced(); }
  [[nodiscard]] double largest_error() const override {
    return largest_attention_error(values_, roundings_of_sum(ranks_));
  }

  [[nodiscard]] double bytes_sent() const override {
    // Own tokens to all others; the others' partial sums to them.
    const std::int64_t rows = (ranks_ - 1) * project_in_.num_rows() + shape_.tokens - project_in_.num_rows();
    return static_cast<double>(rows * hidden_ * size_of(place_.dtype()));
  }

 private:
  Place& place_;
  AttentionShape shape_;
  int ranks_;
  std::int64_t hidden_;
  AttentionShape own_;  // of this rank's heads
  std::int64_t own_cols_;
  AllGatherGemm project_in_;
  GemmReduceScatter project_out_;
  AttentionValues values_;
  GatheredRows tokens_;
  Matrix weight_in_;
  Matrix weight_out_;
  Matrix qkv_;
  Matrix attended_;
  Matrix out_;
  std::unique_ptr<Attention> attention_;
};

}  // namespace

std::unique_ptr<Layer> make_attention_tpsp(Place& place, const AttentionShape& shape, std::uint64_t seed,
                                           const BaselineOptions& baseline) {
  return std::make_unique<AttentionTpsp>(place, shape, seed, baseline);
}

}  // namespace flashoverlap::layers

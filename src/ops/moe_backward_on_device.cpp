#include <algorithm>

#include "ops/moe_gradients.h"
#include "ops/moe_state.h"
#include "plan/moe_device.h"

/// The backward where the rows of a layer lie in a device's memory: the same plans, in the stream of the
/// forward; what nobody waits for in a stream beside it.
namespace flashoverlap {
namespace {

using plan::MoeDevice;
using plan::MoeExpertRows;

MoeExpertRows make_expert_rows(const ops::ExpertRows& experts) {
  MoeExpertRows rows;
  rows.begin.push_back(0);
  for (const auto& steps : experts.experts) {
    for (const ops::ExpertRows::Step& step : steps) {
      for (std::int64_t row = 0; row < step.rows; ++row)
        rows.row.push_back(static_cast<std::int32_t>(step.row_begin + row));
    }
    while (std::ssize(rows.row) % MoeExpertRows::kUnit != 0) rows.row.push_back(-1);
    rows.begin.push_back(std::ssize(rows.row));
  }
  return rows;
}

}  // namespace

/// One backward pass. Overlapped, the weights of the second GEMM are transposed beside the dispatch, and the
/// weights' gradients computed beside the second GEMM and its return. The GEMMs keep their SMs until they
/// end, so what is beside them has the SMs that are left to communication, and all of them before a GEMM
/// begins and while the last results travel.
///
/// Nothing here waits for ever: what is in the side stream waits for the caller's stream at two places, both
/// behind everything that it needs of other ranks, and ends by itself; the dispatch's GEMM, which waits for
/// other ranks, waits for nothing of the side stream.
class MoeLayer::State::BackwardOnDevice {
 public:
  BackwardOnDevice(State& state, const BackwardCall& on)
      : s_(state),
        on_(on),
        stream_(state.device_stream),
        side_(on.method == Method::kOverlap ? state.device->side_stream() : state.device_stream) {
    s_.prepare(s_.backward_plans, s_.earlier_backward_plans, on.method, intermediate_, middle_);
    if (s_.call->product_rows < 0) {
      const MoeExpertRows by_expert = make_expert_rows(
          ops::expert_rows(s_.call->layout, s_.backward_plans.dispatch->plan(), s_.first, s_.count));
      s_.device->set_expert_rows(by_expert);
      s_.call->product_rows = std::ssize(by_expert.row);
    }
    reserve(s_.call->product_rows);
  }

  void run(Timeline* timeline) {
    MoeDevice& passes = *s_.device;
    // D = A · B^T, so gradients by A need the weights the other way round.
    passes.transpose(on_.weights.down, s_.count, hidden_, intermediate_, transposed_down_, stream_);
    passes.gather(on_.out_gradient, on_.ldg, hidden_, dtype_, true, gradient_rows_, stream_);
    passes.follow(side_, stream_);
    passes.transpose(on_.weights.up, s_.count, middle_, hidden_, transposed_up_, side_);
    const DeviceGemms gemms = s_.backward_gemms();
    s_.run_on_device(*s_.backward_plans.dispatch, gemms.first, stream_, timeline);
    passes.follow(stream_, side_);
    passes.activate_backward(kept(Buffer::kHidden), activated_gradient_, s_.call->layout.rows, intermediate_,
                             s_.options.activation, s_.options.gated, dtype_, hidden_gradient_, stream_);
    passes.follow(side_, stream_);
    s_.run_on_device(s_.combine_of(s_.backward_plans), gemms.second, stream_, timeline);
    passes.reduce(result_gradient_, hidden_, dtype_, false, on_.gradients.input, on_.gradients.input_ld,
                  stream_);
    // Last on the host: other ranks wait for what is above, and the first product may wait for the passes.
    compute_weight_gradients();
    passes.follow(stream_, side_);
    passes.end(stream_);
  }

 private:
  using Buffer = MoeDevice::Buffer;

  void reserve(std::int64_t product_rows) {
    const std::int64_t expert_rows = s_.call->layout.rows;
    const auto get = [&](Buffer buffer, std::int64_t elements) {
      return s_.reserve_on_device(buffer, elements, stream_);
    };
    gradient_rows_ = get(Buffer::kGradientRows, s_.call->places.num_rows * hidden_);
    activated_gradient_ = get(Buffer::kActivatedGradient, expert_rows * intermediate_);
    hidden_gradient_ = get(Buffer::kHiddenGradient, expert_rows * middle_);
    result_gradient_ = get(Buffer::kResultGradient, s_.call->layout.send_rows * hidden_);
    transposed_up_ = get(Buffer::kTransposedUp, s_.count * middle_ * hidden_);
    transposed_down_ = get(Buffer::kTransposedDown, s_.count * intermediate_ * hidden_);
    left_ = get(Buffer::kLeftRows, product_rows * std::max(hidden_, middle_));
    right_ = get(Buffer::kRightRows, product_rows * std::max(hidden_, intermediate_));
  }

  /// What the forward left.
  [[nodiscard]] const void* kept(Buffer buffer) const { return s_.device->reserve(buffer, 0); }

  void compute_weight_gradients() {
    if (on_.gradients.routing_weights != nullptr) {
      s_.device->weight_gradient(on_.out_gradient, on_.ldg, kept(Buffer::kResults), hidden_, dtype_,
                                 on_.gradients.routing_weights, side_);
    }
    if (on_.gradients.down != nullptr)
      multiply(gradient_rows_, hidden_, kept(Buffer::kActivated), intermediate_, on_.gradients.down);
    if (on_.gradients.up != nullptr)
      multiply(hidden_gradient_, middle_, kept(Buffer::kRows), hidden_, on_.gradients.up);
  }

  /// to[e] = left_e^T · right_e. Rows are put together by expert first: where they lie by owner, a product
  /// for each owner would read and write `to`, which is larger, once for each.
  void multiply(const void* left, std::int64_t left_cols, const void* right, std::int64_t right_cols,
                float* to) {
    s_.device->order_by_expert(left, left_cols, left_, side_);
    s_.device->order_by_expert(right, right_cols, right_, side_);
    s_.device->multiply_by_expert(left_, left_cols, right_, right_cols, dtype_, to, side_);
  }

  State& s_;
  const BackwardCall& on_;
  void* stream_;
  void* side_;
  DType dtype_ = s_.options.dtype;
  std::int64_t hidden_ = s_.options.hidden;
  std::int64_t intermediate_ = s_.options.intermediate;
  std::int64_t middle_ = s_.activation().hidden_cols();
  void* gradient_rows_ = nullptr;
  void* activated_gradient_ = nullptr;
  void* hidden_gradient_ = nullptr;
  void* result_gradient_ = nullptr;
  void* transposed_up_ = nullptr;
  void* transposed_down_ = nullptr;
  void* left_ = nullptr;
  void* right_ = nullptr;
};

MoeLayer::State::DeviceGemms MoeLayer::State::backward_gemms() {
  using Buffer = MoeDevice::Buffer;
  const auto kept = [&](Buffer buffer) { return device->reserve(buffer, 0); };
  return {.first = {.a = kept(Buffer::kGradientRows),
                    .lda = options.hidden,
                    .b = kept(Buffer::kTransposedDown),
                    .out = kept(Buffer::kActivatedGradient),
                    .ldo = options.intermediate},
          .second = {.a = kept(Buffer::kHiddenGradient),
                     .lda = activation().hidden_cols(),
                     .b = kept(Buffer::kTransposedUp),
                     .out = kept(Buffer::kResultGradient),
                     .ldo = options.hidden}};
}

void MoeLayer::State::backward_on_device(const BackwardCall& on, Timeline* timeline) {
  BackwardOnDevice(*this, on).run(timeline);
}

}  // namespace flashoverlap

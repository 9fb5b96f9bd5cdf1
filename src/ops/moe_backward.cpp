#include <utility>

#include "core/fail.h"
#include "ops/moe_gradients.h"
#include "ops/moe_state.h"

namespace flashoverlap {
namespace {

void reserve(cpu::AlignedBuffer& buffer, std::int64_t bytes, const std::string& purpose, bool poison) {
  if (bytes > buffer.size_bytes()) buffer.grow(bytes, purpose);
  if (poison) buffer.fill_with_nan();
}

}  // namespace

/// One backward pass. What nobody waits for until its end (gradients of the weights), or until the second
/// GEMM (its weights, transposed), fills the waits of both GEMMs when it is overlapped.
class MoeLayer::Backward {
 public:
  Backward(State& state, const void* out_gradient, std::int64_t ldg, const MoeWeights& weights,
           const MoeGradients& gradients, Method method)
      : s_(state),
        by_out_{static_cast<const std::byte*>(out_gradient), ldg * state.element()},
        weights_(weights),
        gradients_(gradients),
        overlaps_(method == Method::kOverlap) {
    reserve_buffers();
    s_.prepare(s_.backward_plans, s_.earlier_backward_plans, method, intermediate_, middle_);
    (void)s_.combine_of(s_.backward_plans);
  }

  /// Gradients by the activated rows, from those by the results.
  static State::Gemm first_gemm(State& s) {
    return {.a = s.gradient_rows,
            .lda = s.options.hidden,
            .b = s.weights_or_nothing(s.transposed_down.data()),
            .out = s.activated_gradient,
            .ldo = s.options.intermediate};
  }
  /// Gradients by the rows.
  static State::Gemm second_gemm(State& s) {
    return {.a = s.hidden_gradient,
            .lda = s.activation().hidden_cols(),
            .b = s.weights_or_nothing(s.transposed_up.data()),
            .out = s.result_gradient,
            .ldo = s.options.hidden};
  }

  void run(MoeReport& report, ops::Stopwatch& watch, Timeline* timeline) {
    add_work_before_dispatch();
    report.phases.weights_us = watch.lap();
    ops::gather_rows(s_.pool, s_.call->rows, s_.call->places, by_out_, hidden_, dtype_, &s_.call->routing,
                     s_.gradient_rows.data());
    report.phases.gather_us = watch.lap();
    s_.run_dispatch(s_.backward_plans, first_gemm(s_), timeline, work_in_dispatch());
    report.phases.dispatch_us = watch.lap();
    report.dispatch_work_us = work_us();
    transposes_.finish(s_.pool);
    report.phases.weights_us += watch.lap();
    ops::activate_backward(s_.pool, s_.activation(), s_.call->layout.rows, dtype_, s_.hidden.data(),
                           s_.activated_gradient.data(), s_.hidden_gradient.data());
    if (gradients_.up != nullptr) {
      ops::add_expert_products(products_, rows_, false, dtype_, {s_.hidden_gradient.data(), middle_},
                               {s_.rows.data(), hidden_}, gradients_.up);
    }
    report.phases.activation_us = watch.lap();
    const double before_us = work_us();
    s_.run_combine(s_.backward_plans, second_gemm(s_), timeline, report, work_in_combine());
    report.phases.combine_us = watch.lap();
    report.combine_work_us = work_us() - before_us;
    ops::reduce_rows(s_.pool, s_.call->routing, s_.call->rows, s_.result_gradient.data(), hidden_, dtype_,
                     false, static_cast<std::byte*>(gradients_.input), gradients_.input_ld * s_.element());
    report.phases.reduce_us = watch.lap();
    products_.finish(s_.pool);
    report.phases.weights_us += watch.lap();
  }

 private:
  void reserve_buffers() {
    const std::int64_t element = s_.element();
    const bool poison = s_.options.poison_workspace;
    const std::int64_t rows = s_.call->layout.rows;
    reserve(s_.gradient_rows, s_.call->places.num_rows * hidden_ * element, s_.label(), poison);
    reserve(s_.activated_gradient, rows * intermediate_ * element, s_.label(), poison);
    reserve(s_.hidden_gradient, rows * middle_ * element, s_.label(), poison);
    reserve(s_.result_gradient, s_.call->layout.send_rows * hidden_ * element, s_.label(), poison);
    reserve(s_.transposed_up, s_.count * middle_ * hidden_ * element, s_.label(), poison);
    reserve(s_.transposed_down, s_.count * intermediate_ * hidden_ * element, s_.label(), poison);
  }

  void add_work_before_dispatch() {
    // D = A · B^T, so gradients by A need the weights the other way round.
    ops::WorkList first;
    ops::add_transposes(first, s_.count, hidden_, intermediate_, dtype_,
                        static_cast<const std::byte*>(weights_.down), s_.transposed_down.data());
    first.finish(s_.pool);
    ops::add_transposes(transposes_, s_.count, middle_, hidden_, dtype_,
                        static_cast<const std::byte*>(weights_.up), s_.transposed_up.data());
    if (gradients_.routing_weights != nullptr) {
      ops::add_weight_gradient(products_, s_.call->routing, s_.call->rows, s_.results.data(), by_out_,
                               hidden_, dtype_, gradients_.routing_weights);
    }
    rows_ = ops::expert_rows(s_.call->layout, s_.backward_plans.dispatch->plan(), s_.first, s_.count);
    if (gradients_.down != nullptr) {
      ops::add_expert_products(products_, rows_, true, dtype_, {s_.gradient_rows.data(), hidden_},
                               {s_.activated.data(), intermediate_}, gradients_.down);
    }
  }

  OtherWork work_in_dispatch() {
    if (!overlaps_) return nullptr;
    return [this](const SliceArrived& has_arrived) {
      return transposes_.do_step(has_arrived) || products_.do_step(has_arrived);
    };
  }

  OtherWork work_in_combine() {
    if (!overlaps_) return nullptr;
    return [this](const SliceArrived&) { return products_.do_step(nullptr); };
  }

  [[nodiscard]] double work_us() const {
    return (transposes_.busy_us() + products_.busy_us()) / s_.pool.num_threads();
  }

  State& s_;
  ops::RowsView by_out_;
  const MoeWeights& weights_;
  const MoeGradients& gradients_;
  bool overlaps_;
  DType dtype_ = s_.options.dtype;
  std::int64_t hidden_ = s_.options.hidden;
  std::int64_t intermediate_ = s_.options.intermediate;
  std::int64_t middle_ = s_.activation().hidden_cols();
  ops::ExpertRows rows_;
  ops::WorkList transposes_;  // for the second GEMM
  ops::WorkList products_;    // for the caller
};

MoeReport MoeLayer::backward(const void* out_gradient, std::int64_t ldg, const MoeWeights& weights,
                             const MoeGradients& gradients, Method method, Timeline* timeline) {
  State& s = *state_;
  MoeReport report;
  ops::Stopwatch watch;
  if (s.options.overlap_if != MoeOverlapIf::kAlways && method == Method::kOverlap) method = s.call_method;
  report.method = method;
  s.backward_valid = false;
  s.meet(
      "backward",
      [&] {
        if (!s.results_valid) core::fail(ErrorKind::kBadArgument, "backward needs a forward before it");
        const std::int64_t tokens = s.call->routing.tokens;
        s.check_matrix("out_gradient", out_gradient, "ldg", ldg, tokens);
        s.check_matrix("input gradient", gradients.input, "input_ld", gradients.input_ld, tokens);
        s.check_weights(weights);
        s.check_device_memory(tokens,
                              {{"out_gradient", out_gradient},
                               {"input gradient", gradients.input},
                               {"gradient of the routing's weights", gradients.routing_weights}},
                              {{"up weights", weights.up},
                               {"down weights", weights.down},
                               {"gradient of the up weights", gradients.up},
                               {"gradient of the down weights", gradients.down}});
        // The rows lie as the forward's plan had them.
        const auto rows_of = [](const MoePlanOptions& o) { return std::pair(o.padding, o.order); };
        if (rows_of(s.plan_options(method)) != rows_of(s.forward_plans.options)) {
          core::fail(ErrorKind::kBadArgument,
                     "backward is {}, but the forward before it left its rows in another order; use the same "
                     "method, or "
                     "padding 'ragged' and order 'owner-major'",
                     method == Method::kSerial ? "serial" : "overlapped");
        }
      },
      method);
  try {
    if (s.device != nullptr) {
      report.phases.counts_us = watch.lap();
      s.backward_on_device({out_gradient, ldg, weights, gradients, method}, timeline);
    } else {
      Backward backward(s, out_gradient, ldg, weights, gradients, method);
      report.phases.counts_us = watch.lap();
      backward.run(report, watch, timeline);
      s.observed = false;  // of another GEMM than the forward's
    }
    s.fill_report(report, method);
  } catch (const std::exception& error) {
    if (s.communicator.size() > 1) s.communicator.abort(error.what());
    throw;
  }
  s.backward_valid = true;
  return report;
}

MoeLayer::Parts MoeLayer::measure_backward_parts() {
  State& s = *state_;
  s.meet(
      "backward parts",
      [&] {
        if (!s.backward_valid) {
          core::fail(ErrorKind::kBadArgument, "measure_backward_parts needs a backward before it");
        }
      },
      Method::kOverlap);
  s.backward_valid = false;
  if (s.device != nullptr) {
    const State::DeviceGemms gemms = s.backward_gemms();
    return s.measure_parts_on_device(s.backward_plans, gemms.first, gemms.second);
  }
  return s.measure_parts(s.backward_plans, Backward::first_gemm(s), Backward::second_gemm(s));
}

}  // namespace flashoverlap

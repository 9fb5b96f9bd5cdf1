#include <utility>

#include "core/fail.h"
#include "ops/moe_state.h"

namespace flashoverlap {
namespace {

void reserve(cpu::AlignedBuffer& buffer, std::int64_t bytes, const std::string& purpose, bool poison) {
  if (bytes > buffer.size_bytes()) buffer.grow(bytes, purpose);
  if (poison) buffer.fill_with_nan();
}

}  // namespace

MoeReport MoeLayer::backward(const void* out_gradient, std::int64_t ldg, const MoeWeights& weights,
                             const MoeGradients& gradients, Method method, Timeline* timeline) {
  State& s = *state_;
  MoeReport report;
  ops::Stopwatch watch;
  if (s.options.overlap_if != MoeOverlapIf::kAlways && method == Method::kOverlap) method = s.call_method;
  report.method = method;
  s.meet(
      "backward",
      [&] {
        if (!s.results_valid) core::fail(ErrorKind::kBadArgument, "backward needs a forward before it");
        const std::int64_t tokens = s.call->routing.tokens;
        s.check_matrix("out_gradient", out_gradient, "ldg", ldg, tokens);
        s.check_matrix("input gradient", gradients.input, "input_ld", gradients.input_ld, tokens);
        s.check_weights(weights);
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
    const std::int64_t h = s.options.hidden;
    const std::int64_t i = s.options.intermediate;
    const std::int64_t u = s.activation().hidden_cols();
    const std::int64_t element = s.element();
    const bool poison = s.options.poison_workspace;
    const std::int64_t rows = s.call->layout.rows;
    reserve(s.gradient_rows, s.call->places.num_rows * h * element, s.label(), poison);
    reserve(s.activated_gradient, rows * i * element, s.label(), poison);
    reserve(s.hidden_gradient, rows * u * element, s.label(), poison);
    reserve(s.result_gradient, s.call->layout.send_rows * h * element, s.label(), poison);
    reserve(s.transposed_up, s.count * u * h * element, s.label(), poison);
    reserve(s.transposed_down, s.count * i * h * element, s.label(), poison);
    s.prepare(s.backward_plans, method, i, u);
    report.phases.counts_us = watch.lap();

    // D = A · B^T, so gradients by A need the weights the other way round.
    const DType dtype = s.options.dtype;
    ops::transpose_stack(s.pool, s.count, u, h, dtype, static_cast<const std::byte*>(weights.up),
                         s.transposed_up.data());
    ops::transpose_stack(s.pool, s.count, h, i, dtype, static_cast<const std::byte*>(weights.down),
                         s.transposed_down.data());
    report.phases.weights_us = watch.lap();
    const ops::RowsView by_out{static_cast<const std::byte*>(out_gradient), ldg * element};
    ops::gather_rows(s.pool, s.call->rows, s.call->places, by_out, h, dtype, &s.call->routing,
                     s.gradient_rows.data());
    if (gradients.routing_weights != nullptr) {
      ops::weight_gradient(s.pool, s.call->routing, s.call->rows, s.results.data(), by_out, h, dtype,
                           gradients.routing_weights);
    }
    report.phases.gather_us = watch.lap();
    s.run(s.backward_plans, false, s.gradient_rows, h, s.weights_or_nothing(s.transposed_down.data()),
          s.activated_gradient, i, timeline);
    report.phases.dispatch_us = watch.lap();
    ops::activate_backward(s.pool, s.activation(), rows, dtype, s.hidden.data(), s.activated_gradient.data(),
                           s.hidden_gradient.data());
    report.phases.activation_us = watch.lap();
    s.run_combine(s.backward_plans, s.hidden_gradient, u, s.weights_or_nothing(s.transposed_up.data()),
                  s.result_gradient, timeline, report);
    s.observed = false;  // of another GEMM than the forward's
    report.phases.combine_us = watch.lap();
    ops::reduce_rows(s.pool, s.call->routing, s.call->rows, s.result_gradient.data(), h, dtype, false,
                     static_cast<std::byte*>(gradients.input), gradients.input_ld * element);
    report.phases.reduce_us = watch.lap();
    if (gradients.up != nullptr) {
      ops::expert_products(s.pool, s.call->layout, s.first, s.count, dtype, s.hidden_gradient.data(), u,
                           s.rows.data(), h, gradients.up);
    }
    if (gradients.down != nullptr) {
      ops::expert_products(s.pool, s.call->layout, s.first, s.count, dtype, s.gradient_rows.data(), h,
                           s.activated.data(), i, gradients.down);
    }
    report.phases.weights_us += watch.lap();
    s.fill_report(report, method);
  } catch (const std::exception& error) {
    if (s.communicator.size() > 1) s.communicator.abort(error.what());
    throw;
  }
  return report;
}

}  // namespace flashoverlap

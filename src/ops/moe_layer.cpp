#include "flashoverlap/moe_layer.h"

#include <algorithm>
#include <utility>

#include "core/fail.h"
#include "ops/agree.h"
#include "ops/moe_checks.h"
#include "ops/moe_state.h"

namespace flashoverlap {
namespace {

using ops::at_least;

void check_options(const MoeLayerOptions& options, Communicator& communicator) {
  at_least("hidden", options.hidden, 0);
  at_least("intermediate", options.intermediate, 0);
  at_least("num_experts", options.num_experts, 1);
  at_least("tile_m", options.tile_m, 0);
  at_least("tile_n", options.tile_n, 0);
  at_least("segment_bands", options.segment_bands, 1);
  at_least("consumers", options.consumers, 1);
  at_least("collective_groups", options.collective_groups, 1);
  at_least("capacity", options.capacity, 0);
  if (options.overlap_if == MoeOverlapIf::kPredicted && communicator.rank() == 0 &&
      options.machine == nullptr) {
    core::fail(ErrorKind::kBadArgument,
               "overlap_if is 'predicted', but there is no machine; a machine profile is expected");
  }
  // The plan's own checks, on nothing.
  MoePlanOptions plan;
  plan.world_size = communicator.size();
  plan.rank = communicator.rank();
  plan.num_experts = options.num_experts;
  plan.padding = options.padding;
  plan.order = options.order;
  plan.transport = options.transport;
  const auto numbers = static_cast<std::size_t>(communicator.size() * options.num_experts);
  static_cast<void>(
      moe_layout(plan, {communicator.size(), options.num_experts, std::vector<std::int64_t>(numbers)}));
}

/// Aborts the communicator when the call ends with an exception, so that the others do not wait for this
/// rank.
template <typename Function>
void or_abort(Communicator& communicator, const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    if (communicator.size() > 1) communicator.abort(error.what());
    throw;
  }
}

}  // namespace

MoeLayer::MoeLayer(Context& context, const MoeLayerOptions& options) {
  const std::string name = fmt::format("moe-layer hidden={} intermediate={} experts={}", options.hidden,
                                       options.intermediate, options.num_experts);
  const std::vector<std::string> units = ops::agree(context.communicator(), name, [&]() -> ops::Ticket {
    check_options(options, context.communicator());
    state_ = std::make_unique<State>(context, options);
    state_->check_consumers();
    state_->check_device_options();
    return {.agreement = state_->agreement("layer", 0, Method::kOverlap),
            .description = fmt::format(
                "{}, {}{}, tile {}x{}, {}, {}, {}, capacity {}, {} bands a segment, {} consumers, {} "
                "groups{}, overlapped {}",
                state_->label(), options.gated ? "gated " : "", name_of(options.activation), options.tile_m,
                options.tile_n, name_of(options.padding), name_of(options.order), name_of(options.transport),
                options.capacity, options.segment_bands, options.consumers, options.collective_groups,
                options.adapt ? ", adaptive" : "", name_of(options.overlap_if)),
            .payload = std::to_string(state_->device != nullptr ? state_->device->num_units() : 0)};
  });
  state_->tile_units = std::stoll(units.front());
}

MoeLayer::~MoeLayer() = default;

void MoeLayer::State::check_consumers() const {
  constexpr std::int64_t kMostThreads = 16;
  const bool can_put =
      device != nullptr ? device->most_consumers() > 0 : communicator.symmetric_heap() != nullptr;
  if (options.transport == MoeTransport::kPut && communicator.size() > 1 && !can_put) {
    core::fail(
        ErrorKind::kUnsupported,
        "transport 'put' needs ranks that can write into each other's memory, which those of communicator "
        "'{}' cannot; use transport 'collective'",
        communicator.name());
  }
  const std::int64_t most = device != nullptr && can_put ? device->most_consumers() : kMostThreads;
  if (options.consumers > most || options.controller.max_consumers > most) {
    core::fail(ErrorKind::kBadArgument, "consumers is {} and may become {}; at most {} are expected",
               options.consumers, options.controller.max_consumers, most);
  }
}

const MoeLayerOptions& MoeLayer::options() const {
  return state_->options;
}
std::int64_t MoeLayer::first_expert() const {
  return state_->first;
}
std::int64_t MoeLayer::local_experts() const {
  return state_->count;
}
MoeSetting MoeLayer::setting() const {
  return state_->controller.setting();
}
void MoeLayer::set_adaptive(bool adapt) {
  state_->options.adapt = adapt;
  state_->controller.freeze(!adapt);
}

const OverlapPlan& MoeLayer::dispatch_plan() const {
  if (state_->forward_plans.dispatch == nullptr)
    core::fail(ErrorKind::kBadArgument, "no call has made a plan yet");
  return state_->forward_plans.dispatch->plan();
}
const OverlapPlan& MoeLayer::combine_plan() const {
  if (state_->forward_plans.combine == nullptr)
    core::fail(ErrorKind::kBadArgument, "no call has made a plan yet");
  return state_->forward_plans.combine->plan();
}

void MoeLayer::State::reserve_forward() {
  const std::int64_t places = call->places.num_rows;
  const std::int64_t expert_rows = call->layout.rows;
  const std::int64_t middle = activation().hidden_cols();
  const std::pair<cpu::AlignedBuffer*, std::int64_t> needs[] = {
      {&rows, places * options.hidden},
      {&hidden, expert_rows * middle},
      {&activated, expert_rows * options.intermediate},
      {&results, call->layout.send_rows * options.hidden}};
  for (const auto& [buffer, elements] : needs) {
    if (elements * element() > buffer->size_bytes()) buffer->grow(elements * element(), label());
    if (options.poison_workspace) buffer->fill_with_nan();
  }
}

MoeLayer::State::Gemm MoeLayer::State::first_gemm(const MoeWeights& weights) {
  return {.a = rows,
          .lda = options.hidden,
          .b = weights_or_nothing(weights.up),
          .out = hidden,
          .ldo = activation().hidden_cols()};
}

MoeLayer::State::Gemm MoeLayer::State::second_gemm(const MoeWeights& weights) {
  return {.a = activated,
          .lda = options.intermediate,
          .b = weights_or_nothing(weights.down),
          .out = results,
          .ldo = options.hidden};
}

MoeReport MoeLayer::forward(const void* x, std::int64_t ldx, const MoeRouting& routing,
                            const MoeWeights& weights, void* out, std::int64_t ldo, Method method,
                            Timeline* timeline, void* stream) {
  State& s = *state_;
  const State::DeviceCall on{.x = x, .ldx = ldx, .out = out, .ldo = ldo, .stream = stream};
  MoeReport report;
  ops::Stopwatch watch;
  s.results_valid = s.backward_valid = false;
  const auto check = [&] {
    s.check_matrix("x", x, "ldx", ldx, routing.tokens);
    s.check_matrix("out", out, "ldo", ldo, routing.tokens);
    s.check_weights(weights);
    const auto* in_begin = static_cast<const std::byte*>(x);
    auto* out_begin = static_cast<std::byte*>(out);
    if (routing.tokens > 0 && in_begin < out_begin + routing.tokens * ldo * s.element() &&
        out_begin < in_begin + routing.tokens * ldx * s.element()) {
      core::fail(ErrorKind::kBadArgument, "out at {} overlaps x at {}; they must lie apart", out, x);
    }
    s.check_device_memory(routing.tokens, {{"x", x}, {"out", out}},
                          {{"up weights", weights.up}, {"down weights", weights.down}});
  };
  const MoeCounts counts = s.exchange_counts(routing, check, method, report);
  or_abort(s.communicator, [&] {
    s.start_call(routing, counts);
    const MoePlanOptions plan = s.plan_options(method);
    s.call->layout = moe_layout(plan, s.call->counts);
    std::int64_t own_begin = 0;
    for (std::int64_t e = 0; e < s.first; ++e) own_begin += s.call->counts.at(plan.rank, e);
    s.call->places = ops::make_row_places(s.call->layout, own_begin, plan.rank);
    s.prepare(s.forward_plans, s.earlier_forward_plans, method, s.activation().hidden_cols(),
              s.options.intermediate);
    if (s.device != nullptr) {
      report.phases.counts_us = watch.lap();
      s.forward_on_device(on, weights, timeline, report);
      return s.fill_report(report, method);
    }
    (void)s.combine_of(s.forward_plans);
    s.reserve_forward();
    report.phases.counts_us = watch.lap();
    ops::gather_rows(s.pool, s.call->rows, s.call->places,
                     {static_cast<const std::byte*>(x), ldx * s.element()}, s.options.hidden, s.options.dtype,
                     nullptr, s.rows.data());
    report.phases.gather_us = watch.lap();
    s.run_dispatch(s.forward_plans, s.first_gemm(weights), timeline);
    report.phases.dispatch_us = watch.lap();
    ops::activate_rows(s.pool, s.activation(), s.call->layout.rows, s.options.dtype, s.hidden.data(),
                       s.activated.data());
    report.phases.activation_us = watch.lap();
    s.run_combine(s.forward_plans, s.second_gemm(weights), timeline, report);
    report.phases.combine_us = watch.lap();
    ops::reduce_rows(s.pool, s.call->routing, s.call->rows, s.results.data(), s.options.hidden,
                     s.options.dtype, true, static_cast<std::byte*>(out), ldo * s.element());
    report.phases.reduce_us = watch.lap();
    s.fill_report(report, method);
  });
  s.results_valid = true;
  s.call_method = method;
  if (s.device != nullptr) return report;
  if (method == Method::kSerial) s.observed = false;  // consumers had nothing to do
  // What the counts cost is the same either way, but for plans that the first call makes.
  s.call_us = report.phases.total_us() - report.phases.counts_us;
  return report;
}

MoeLayer::Parts MoeLayer::measure_parts(const MoeWeights& weights) {
  State& s = *state_;
  s.meet(
      "parts",
      [&] {
        if (!s.results_valid) core::fail(ErrorKind::kBadArgument, "measure_parts needs a forward before it");
        s.check_weights(weights);
      },
      Method::kOverlap);
  s.results_valid = s.backward_valid = false;
  if (s.device != nullptr) {
    const State::DeviceGemms gemms = s.forward_gemms(weights);
    return s.measure_parts_on_device(s.forward_plans, gemms.first, gemms.second);
  }
  return s.measure_parts(s.forward_plans, s.first_gemm(weights), s.second_gemm(weights));
}

}  // namespace flashoverlap

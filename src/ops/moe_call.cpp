#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <tuple>

#include "core/fail.h"
#include "ops/agree.h"
#include "ops/moe_state.h"
#include "plan/agreement.h"

/// What forward and backward have in common: checks, meeting the other ranks, plans, running them.
namespace flashoverlap {
namespace {

std::int64_t chosen(std::int64_t option, std::int64_t otherwise) {
  return option == 0 ? otherwise : option;
}

/// The bounds of adaptation, with the layer's own setting inside.
MoeControllerOptions bounds_around(const MoeLayerOptions& options, const plan::MoeDevice* device) {
  MoeControllerOptions bounds = options.controller;
  static_cast<void>(MoeController(bounds, {}));  // what the caller passed must hold by itself
  bounds.min_consumers = std::min(bounds.min_consumers, options.consumers);
  bounds.max_consumers = std::max(bounds.max_consumers, options.consumers);
  bounds.min_segment_bands = std::min(bounds.min_segment_bands, options.segment_bands);
  bounds.max_segment_bands = std::max(bounds.max_segment_bands, options.segment_bands);
  if (device != nullptr) bounds.total_units = device->consumers_take_units() ? device->num_units() : 0;
  return bounds;
}

std::int64_t units_of(const Context& context, const plan::MoeDevice* device) {
  return device != nullptr ? device->num_units() : std::max(1, context.num_threads());
}

/// What a rank tells of the call before.
struct Told {
  MoeObservation observation;
  double call_us = 0;
};

/// What a rank shows at the start of a call: the call before, then rows per expert.
std::string encode(const Told& told, const std::vector<std::int64_t>& rows) {
  std::string bytes(sizeof(Told) + rows.size() * sizeof(std::int64_t), '\0');
  std::memcpy(bytes.data(), &told, sizeof(Told));
  if (!rows.empty()) {
    std::memcpy(bytes.data() + sizeof(Told), rows.data(), rows.size() * sizeof(std::int64_t));
  }
  return bytes;
}

void decode(const std::string& bytes, Told& worst, std::vector<std::int64_t>& rows,
            std::int64_t num_experts) {
  const auto size = static_cast<std::size_t>(num_experts);
  if (bytes.size() != sizeof(Told) + size * sizeof(std::int64_t)) {
    core::fail(ErrorKind::kCommunication, "counts of another rank have {} bytes; {} are expected",
               bytes.size(), sizeof(Told) + size * sizeof(std::int64_t));
  }
  Told other;
  std::memcpy(&other, bytes.data(), sizeof(other));
  // The rank that ends last tells.
  const auto end = [](const MoeObservation& o) { return o.producer_us + o.backlog_us; };
  if (end(other.observation) > end(worst.observation)) worst.observation = other.observation;
  worst.call_us = std::max(worst.call_us, other.call_us);
  const std::size_t begin = rows.size();
  rows.resize(begin + size);
  std::memcpy(rows.data() + begin, bytes.data() + sizeof(other), size * sizeof(std::int64_t));
}

}  // namespace

MoeLayer::State::State(Context& context_of_layer, const MoeLayerOptions& options_of_layer)
    : context(context_of_layer),
      communicator(context_of_layer.communicator()),
      options(options_of_layer),
      device(context_of_layer.executor().make_moe_device()),
      controller(bounds_around(options_of_layer, device.get()),
                 {.consumers = options_of_layer.consumers,
                  .compute_units = units_of(context_of_layer, device.get()),
                  .segment_bands = options_of_layer.segment_bands}),
      pool(std::max(1, context_of_layer.num_threads()), fmt::format("r{} moe", communicator.rank())) {
  const int size = communicator.size();
  const int rank = communicator.rank();
  first = flashoverlap::first_expert(options.num_experts, size, rank);
  count = flashoverlap::first_expert(options.num_experts, size, rank + 1) - first;
  controller.freeze(!options.adapt);
}

std::string MoeLayer::State::label() const {
  return fmt::format("moe-layer hidden={} intermediate={} experts={} {}", options.hidden,
                     options.intermediate, options.num_experts, name_of(options.dtype));
}

MoePlanOptions MoeLayer::State::plan_options(Method method) const {
  MoePlanOptions plan;
  plan.rank = communicator.rank();
  plan.world_size = communicator.size();
  plan.dtype = options.dtype;
  plan.num_experts = options.num_experts;
  plan.tile_m = chosen(options.tile_m, 128);
  plan.tile_n = chosen(options.tile_n, 256);
  plan.padding = options.padding;
  plan.order = options.order;
  plan.transport = options.transport;
  plan.segment_bands = options.segment_bands;
  plan.collective_groups = options.collective_groups;
  plan.resources = {.compute_units = std::max(1, context.num_threads()), .communication_units = 0};
  if (method == Method::kSerial) {
    plan = serial_moe_options(plan);
  } else if (plan.transport == MoeTransport::kPut) {
    const MoeSetting& setting = controller.setting();
    plan.segment_bands = setting.segment_bands;
    plan.resources = {.compute_units = setting.compute_units, .communication_units = setting.consumers};
  }
  return plan;
}

MoePlanOptions MoeLayer::State::dispatch_options(const MoePlanOptions& wanted) const {
  if (device == nullptr || wanted.transport != MoeTransport::kPut || wanted.world_size == 1) return wanted;
  MoePlanOptions dispatch = wanted;
  dispatch.transport = MoeTransport::kCollective;
  constexpr std::int64_t kOverlapped = 2;  // one group would be the serial plan
  dispatch.collective_groups = std::max(kOverlapped, wanted.collective_groups);
  return dispatch;
}

std::uint64_t MoeLayer::State::agreement(std::string_view call_name, std::int32_t top_k,
                                         Method method) const {
  plan::AgreementHash hash;
  hash.add(call_name);
  hash.add(label());
  for (const std::int64_t value :
       {std::int64_t{options.gated}, static_cast<std::int64_t>(options.activation), options.tile_m,
        options.tile_n, static_cast<std::int64_t>(options.padding), static_cast<std::int64_t>(options.order),
        static_cast<std::int64_t>(options.transport), options.segment_bands, options.consumers,
        options.collective_groups, options.capacity, std::int64_t{!controller.frozen()},
        static_cast<std::int64_t>(options.overlap_if), static_cast<std::int64_t>(method),
        std::int64_t{top_k}}) {
    hash.add(value);
  }
  return hash.value();
}

void MoeLayer::State::check_matrix(const char* name, const void* data, const char* ld_name, std::int64_t ld,
                                   std::int64_t num_rows) const {
  if (ld < options.hidden) {
    core::fail(ErrorKind::kBadArgument, "{} is {}; at least {}, the hidden size, is expected", ld_name, ld,
               options.hidden);
  }
  if (num_rows == 0 || options.hidden == 0) return;
  if (data == nullptr) core::fail(ErrorKind::kBadArgument, "{} is null", name);
  if (reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(element()) != 0) {
    core::fail(ErrorKind::kBadArgument, "{} is at {}, which is not aligned to its {} bytes an element", name,
               data, element());
  }
}

void MoeLayer::State::check_weights(const MoeWeights& weights) const {
  if (count * options.hidden * options.intermediate == 0) return;
  if (weights.up == nullptr) core::fail(ErrorKind::kBadArgument, "the up weights are null");
  if (weights.down == nullptr) core::fail(ErrorKind::kBadArgument, "the down weights are null");
}

MoeCounts MoeLayer::State::exchange_counts(const MoeRouting& routing, const std::function<void()>& check,
                                           Method& method, MoeReport& report) {
  if (device != nullptr) recall_device();
  const std::vector<std::string> payloads = ops::agree(communicator, label(), [&]() -> ops::Ticket {
    if (routing.num_experts != options.num_experts) {
      core::fail(ErrorKind::kBadArgument, "the routing is for {} experts, the layer has {}",
                 routing.num_experts, options.num_experts);
    }
    std::vector<std::int64_t> counts = count_rows(routing);
    check();
    return {.agreement = agreement("forward", routing.top_k, method),
            .description = fmt::format("{} top_k={}, {}", label(), routing.top_k,
                                       method == Method::kSerial ? "serial" : "overlapped"),
            .payload = encode({observed ? observation : MoeObservation{}, call_us}, counts)};
  });
  MoeCounts all{communicator.size(), options.num_experts, {}};
  Told worst;
  for (const std::string& payload : payloads) decode(payload, worst, all.rows, options.num_experts);
  if (options.adapt && worst.observation.producer_us > 0) {
    report.adaptation = controller.observe(worst.observation);
  }
  observed = false;
  call_us = 0;
  method = decide(method, all, worst.call_us, report);
  return all;
}

void MoeLayer::State::meet(const char* what, const std::function<void()>& check, Method method) {
  ops::agree(communicator, label(), [&]() -> ops::Ticket {
    check();
    return {.agreement = agreement(what, 0, method),
            .description = fmt::format("{} of {}", what, label()),
            .payload = {}};
  });
}

void MoeLayer::State::start_call(const MoeRouting& routing, const MoeCounts& counts) {
  Call next;
  next.routing = routing;
  next.counts = with_capacity(counts, options.capacity);
  for (std::size_t i = 0; i < counts.rows.size(); ++i)
    next.all_dropped += counts.rows[i] - next.counts.rows[i];
  const auto rank = static_cast<std::size_t>(communicator.rank());
  const auto experts = static_cast<std::size_t>(options.num_experts);
  const auto own = next.counts.rows.begin() + static_cast<std::ptrdiff_t>(rank * experts);
  next.rows = ops::make_send_rows(routing, std::vector<std::int64_t>(own, own + options.num_experts));
  call = std::move(next);
}

void MoeLayer::State::prepare(Plans& plans, Plans& earlier, Method method, std::int64_t dispatch_n,
                              std::int64_t combine_k) const {
  const MoePlanOptions wanted = plan_options(method);
  const auto key = [](const MoePlanOptions& o) {
    return std::tuple(o.padding, o.order, o.transport, o.segment_bands, o.collective_groups,
                      o.resources.compute_units, o.resources.communication_units);
  };
  const auto is_wanted = [&](const Plans& made) {
    return made.dispatch != nullptr && key(made.options) == key(wanted) &&
           made.counts.rows == call->counts.rows && made.dispatch_n == dispatch_n &&
           made.combine_k == combine_k;
  };
  if (is_wanted(plans)) return;
  std::swap(plans, earlier);
  if (is_wanted(plans)) return;
  plans = {.options = wanted,
           .counts = call->counts,
           .dispatch_n = dispatch_n,
           .combine_k = combine_k,
           .dispatch = context.executor().prepare(plan_moe_dispatch(
               with_tile(dispatch_options(wanted), call->counts, dispatch_n, options.hidden), call->counts,
               dispatch_n, options.hidden)),
           .combine = nullptr};
}

PreparedPlan& MoeLayer::State::combine_of(Plans& plans) const {
  if (plans.combine == nullptr) {
    plans.combine = context.executor().prepare(
        plan_moe_combine(with_tile(plans.options, plans.counts, options.hidden, plans.combine_k),
                         plans.counts, options.hidden, plans.combine_k));
  }
  return *plans.combine;
}

const void* MoeLayer::State::weights_or_nothing(const void* weights) {
  if (count > 0) return weights;
  const std::int64_t bytes =
      std::max(activation().hidden_cols(), options.intermediate) * options.hidden * element();
  if (bytes > nothing.size_bytes()) nothing.grow(bytes, label());
  return nothing.data();
}

Operands MoeLayer::State::Gemm::operands() const {
  Operands operands;
  operands.a = a.data();
  operands.lda = lda;
  operands.b = b;
  operands.ldb = lda;
  operands.out = out.data();
  operands.ldo = ldo;
  return operands;
}

void MoeLayer::State::run_dispatch(Plans& plans, const Gemm& gemm, Timeline* timeline,
                                   OtherWork other_work) const {
  Operands operands = gemm.operands();
  operands.other_work = std::move(other_work);
  context.executor().execute(*plans.dispatch, operands, Mode::kRun, timeline);
}

void MoeLayer::State::run_combine(Plans& plans, const Gemm& gemm, Timeline* timeline, MoeReport& report,
                                  OtherWork other_work) {
  Timeline spans;
  Operands operands = gemm.operands();
  operands.other_work = std::move(other_work);
  context.executor().execute(*plans.combine, operands, Mode::kRun, &spans);
  observation = ops::observe(spans);
  observed = true;
  report.backlog_us = observation.backlog_us;
  report.consumer_idle = observation.consumer_idle;
  if (timeline != nullptr) {
    timeline->spans.insert(timeline->spans.end(), spans.spans.begin(), spans.spans.end());
  }
}

MoeLayer::Parts MoeLayer::State::measure_parts(Plans& plans, const Gemm& first_gemm,
                                               const Gemm& second_gemm) const {
  return measure_each(plans, [&](PreparedPlan& plan, bool is_first, Mode mode) {
    ops::Stopwatch watch;
    context.executor().execute(plan, (is_first ? first_gemm : second_gemm).operands(), mode, nullptr);
    return watch.lap();
  });
}

MoeLayer::Parts MoeLayer::State::measure_each(const Plans& plans, const TimedRun& run) const {
  const auto measure = [&](bool is_first, Mode mode) {
    communicator.exchange(std::uint64_t{0}, {.operation = "moe-layer parts"});
    return run(is_first ? *plans.dispatch : *plans.combine, is_first, mode);
  };
  Parts parts;
  parts.dispatch_gemm_us = measure(true, Mode::kGemmOnly);
  parts.dispatch_transfer_us = measure(true, Mode::kCommunicationOnly);
  parts.combine_gemm_us = measure(false, Mode::kGemmOnly);
  parts.combine_transfer_us = measure(false, Mode::kCommunicationOnly);
  parts.dispatch_us = measure(true, Mode::kRun);
  parts.combine_us = measure(false, Mode::kRun);
  return parts;
}

void MoeLayer::State::fill_report(MoeReport& report, Method method) const {
  report.waste = moe_waste(
      with_tile(plan_options(method), call->counts, options.hidden, options.intermediate), call->counts);
  report.send_rows = call->layout.send_rows;
  report.dropped_rows = call->rows.dropped;
  report.all_dropped_rows = call->all_dropped;
  for (const cpu::AlignedBuffer* buffer :
       {&rows, &hidden, &activated, &results, &gradient_rows, &activated_gradient, &hidden_gradient,
        &result_gradient, &transposed_up, &transposed_down, &nothing}) {
    report.workspace_bytes += buffer->size_bytes();
  }
  if (device != nullptr) report.workspace_bytes += device->reserved_bytes();
  report.setting = controller.setting();
}

namespace ops {

MoeObservation observe(const Timeline& timeline) {
  double first = INFINITY;
  double last_tile = -INFINITY;
  double last_transfer = -INFINITY;
  for (const Span& span : timeline.spans) {
    if (span.kind == SpanKind::kCompute) {
      first = std::min(first, span.begin_us);
      last_tile = std::max(last_tile, span.end_us);
    }
    if (span.kind == SpanKind::kCommunication) last_transfer = std::max(last_transfer, span.end_us);
  }
  MoeObservation observation;
  if (!(last_tile > first)) return observation;
  observation.producer_us = last_tile - first;
  observation.backlog_us = std::max(0.0, last_transfer - last_tile);
  std::map<std::string, double> waited;
  for (const Span& span : timeline.spans) {
    if (span.kind != SpanKind::kWait) continue;
    waited[span.track] += std::max(0.0, std::min(span.end_us, last_tile) - std::max(span.begin_us, first));
  }
  double total = 0;
  for (const auto& [track, us] : waited) total += us;
  if (!waited.empty()) {
    const double available = observation.producer_us * static_cast<double>(waited.size());
    observation.consumer_idle = std::clamp(total / available, 0.0, 1.0);
  }
  return observation;
}

}  // namespace ops
}  // namespace flashoverlap

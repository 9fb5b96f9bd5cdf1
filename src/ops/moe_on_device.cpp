#include <algorithm>
#include <cmath>
#include <limits>

#include "core/fail.h"
#include "ops/moe_state.h"
#include "plan/moe_device.h"

/// The forward where the rows of a layer lie in a device's memory: the same plans, everything in one stream;
/// and what the backward shares with it.
namespace flashoverlap {
namespace {

using plan::MoeDevice;
using plan::MoeRowTables;

std::int32_t narrow(std::int64_t row) {
  return static_cast<std::int32_t>(row);
}

MoeRowTables make_tables(const MoeRouting& routing, const ops::SendRows& rows, const ops::RowPlaces& places) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (places.num_rows > kMost || routing.tokens * routing.top_k > kMost) {
    core::fail(ErrorKind::kUnsupported,
               "{} rows and {} tokens of {} slots on one rank; at most {} are expected on a GPU",
               places.num_rows, routing.tokens, routing.top_k, kMost);
  }
  MoeRowTables tables;
  tables.tokens = routing.tokens;
  tables.top_k = routing.top_k;
  tables.weight = routing.weights;
  tables.place.resize(places.of_send_row.size());
  tables.result.resize(rows.row.size());
  for (std::size_t row = 0; row < rows.token.size(); ++row)
    tables.source.push_back(narrow(rows.token[row] * routing.top_k + rows.slot[row]));
  std::ranges::transform(places.of_send_row, tables.place.begin(), narrow);
  std::ranges::transform(rows.row, tables.result.begin(), narrow);
  for (const auto& [first, last] : places.padding) {
    for (std::int64_t row = first; row < last; ++row) {
      tables.source.push_back(-1);
      tables.place.push_back(narrow(row));
    }
  }
  return tables;
}

/// From the first span to the last, without the passes behind them.
double transfer_and_gemm_us(const Timeline& timeline) {
  double begin = INFINITY;
  double end = -INFINITY;
  for (const Span& span : timeline.spans) {
    if (span.kind == SpanKind::kEpilogue) continue;
    begin = std::min(begin, span.begin_us);
    end = std::max(end, span.end_us);
  }
  return end > begin ? end - begin : 0;
}

MoeObservation observe(const MoeDevice::PutTimes& times) {
  const double idle = times.producer_us > 0 ? times.idle_us / times.producer_us : 0;
  return {.producer_us = times.producer_us,
          .backlog_us = times.backlog_us,
          .consumer_idle = std::clamp(idle, 0.0, 1.0)};
}

}  // namespace

void MoeLayer::State::check_device_options() const {
  if (device == nullptr) return;
  if (options.dtype == DType::kFloat32)
    core::fail(ErrorKind::kUnsupported, "a layer of experts on a GPU computes bf16 and f16, not f32");
  if (communicator.size() > 1 && options.transport == MoeTransport::kPut &&
      (options.order != MoeOrder::kOwnerMajor || options.padding != MoePadding::kRagged)) {
    core::fail(
        ErrorKind::kUnsupported,
        "on GPUs the rows of a rank are dispatched together, which needs order 'owner-major' and padding "
        "'ragged', got '{}' and '{}'",
        name_of(options.order), name_of(options.padding));
  }
  if (options.adapt && options.transport != MoeTransport::kPut)
    core::fail(ErrorKind::kUnsupported, "adapt: on GPUs consumers adapt, which transport 'put' has");
}

MoePlanOptions MoeLayer::State::with_tile(MoePlanOptions plan, const MoeCounts& counts, std::int64_t n,
                                          std::int64_t k) const {
  const bool is_open = options.tile_m == 0 && options.tile_n == 0;
  if (device == nullptr || !is_open || n == 0 || k == 0) return plan;
  std::vector<std::vector<std::int64_t>> groups(static_cast<std::size_t>(counts.world_size));
  for (std::int32_t rank = 0; rank < counts.world_size; ++rank) {
    const std::int64_t end = flashoverlap::first_expert(counts.num_experts, counts.world_size, rank + 1);
    for (std::int64_t e = flashoverlap::first_expert(counts.num_experts, counts.world_size, rank); e < end;
         ++e) {
      for (std::int32_t owner = 0; owner < counts.world_size; ++owner)
        groups[static_cast<std::size_t>(rank)].push_back(counts.at(owner, e));
    }
  }
  const MoeDevice::TileSize tile = device->choose_tile(groups, n, k, options.dtype, tile_units);
  plan.tile_m = tile.rows;
  plan.tile_n = tile.cols;
  return plan;
}

void MoeLayer::State::check_device_memory(std::int64_t tokens, std::initializer_list<NamedMatrix> of_tokens,
                                          std::initializer_list<NamedMatrix> of_weights) const {
  if (device == nullptr) return;
  const auto check = [&](std::int64_t elements, std::initializer_list<NamedMatrix> matrices) {
    for (const auto& [name, data] : matrices) {
      if (elements > 0 && data != nullptr) device->check_address(name, data);
    }
  };
  check(tokens * options.hidden, of_tokens);
  check(count * options.hidden * options.intermediate, of_weights);
}

void* MoeLayer::State::reserve_on_device(MoeDevice::Buffer buffer, std::int64_t elements, void* stream) {
  void* const memory = device->reserve(buffer, elements * element());
  if (options.poison_workspace) device->poison(buffer, stream);
  return memory;
}

void MoeLayer::State::run_on_device(PreparedPlan& plan, const DeviceGemm& gemm, void* stream,
                                    Timeline* timeline, double* us, Mode mode) {
  const auto nothing_here = [&] {
    const std::int64_t columns = std::max(activation().hidden_cols(), options.intermediate);
    return device->reserve(MoeDevice::Buffer::kNothing, columns * options.hidden * element());
  };
  Operands operands;
  operands.a = gemm.a;
  operands.lda = gemm.lda;
  operands.b = count > 0 ? gemm.b : nothing_here();
  operands.ldb = gemm.lda;
  operands.out = gemm.out;
  operands.ldo = gemm.ldo;
  operands.stream = stream;
  if (timeline == nullptr) return context.executor().execute(plan, operands, mode, nullptr);
  Timeline spans;
  context.executor().execute(plan, operands, mode, &spans);
  if (us != nullptr) *us = transfer_and_gemm_us(spans);
  timeline->spans.insert(timeline->spans.end(), spans.spans.begin(), spans.spans.end());
}

void MoeLayer::State::recall_device() {
  if (options.overlap_if == MoeOverlapIf::kMeasured && chooser.wants_time()) call_us = device->clock_us();
  observed = false;
  for (auto last = pending.rbegin(); last != pending.rend(); ++last) {
    const auto times = device->put_times(last->put_call);
    if (!times) continue;
    observation = observe(*times);
    observed = last->setting == controller.setting();  // or it tells of another one
    pending.erase(pending.begin(), last.base());
    return;
  }
}

MoeLayer::State::DeviceGemms MoeLayer::State::forward_gemms(const MoeWeights& weights) {
  using Buffer = MoeDevice::Buffer;
  const auto kept = [&](Buffer buffer) { return device->reserve(buffer, 0); };
  return {.first = {.a = kept(Buffer::kRows),
                    .lda = options.hidden,
                    .b = weights.up,
                    .out = kept(Buffer::kHidden),
                    .ldo = activation().hidden_cols()},
          .second = {.a = kept(Buffer::kActivated),
                     .lda = options.intermediate,
                     .b = weights.down,
                     .out = kept(Buffer::kResults),
                     .ldo = options.hidden}};
}

void MoeLayer::State::forward_on_device(const DeviceCall& on, const MoeWeights& weights, Timeline* timeline,
                                        MoeReport& report) {
  using Buffer = MoeDevice::Buffer;
  const std::int64_t expert_rows = call->layout.rows;
  device_stream = on.stream;
  device->set_rows(make_tables(call->routing, call->rows, call->places));
  device->time_puts(options.adapt || timeline != nullptr);
  const auto reserve = [&](Buffer buffer, std::int64_t elements) {
    (void)reserve_on_device(buffer, elements, on.stream);
  };
  reserve(Buffer::kRows, call->places.num_rows * options.hidden);
  reserve(Buffer::kHidden, expert_rows * activation().hidden_cols());
  reserve(Buffer::kActivated, expert_rows * options.intermediate);
  reserve(Buffer::kResults, call->layout.send_rows * options.hidden);
  const DeviceGemms gemms = forward_gemms(weights);
  device->start_clock(on.stream);
  device->gather(on.x, on.ldx, options.hidden, options.dtype, false, const_cast<void*>(gemms.first.a),
                 on.stream);
  run_on_device(*forward_plans.dispatch, gemms.first, on.stream, timeline, &report.phases.dispatch_us);
  device->activate(gemms.first.out, expert_rows, options.intermediate, options.activation, options.gated,
                   options.dtype, const_cast<void*>(gemms.second.a), on.stream);
  const std::int64_t puts = device->put_calls();
  run_on_device(combine_of(forward_plans), gemms.second, on.stream, timeline, &report.phases.combine_us);
  device->reduce(gemms.second.out, options.hidden, options.dtype, true, on.out, on.ldo, on.stream);
  device->stop_clock(on.stream);
  device->end(on.stream);
  const bool is_timed = options.adapt || timeline != nullptr;
  if (is_timed && device->put_calls() > puts) pending.push_back({puts, controller.setting()});
  if (timeline != nullptr) recall_device();  // the device has passed it
  report.backlog_us = observation.backlog_us;
  report.consumer_idle = observation.consumer_idle;
}

MoeLayer::Parts MoeLayer::State::measure_parts_on_device(Plans& plans, const DeviceGemm& first_gemm,
                                                         const DeviceGemm& second_gemm) {
  return measure_each(plans, [&](PreparedPlan& plan, bool is_first, Mode mode) {
    Timeline spans;
    double us = 0;
    device->hold(device_stream);  // the device, not the host's launches, is measured
    run_on_device(plan, is_first ? first_gemm : second_gemm, device_stream, &spans, &us, mode);
    return us;
  });
}

}  // namespace flashoverlap

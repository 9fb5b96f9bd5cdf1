#include <algorithm>
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

}  // namespace

void MoeLayer::State::check_device_options() const {
  if (device == nullptr) return;
  if (options.dtype == DType::kFloat32)
    core::fail(ErrorKind::kUnsupported, "a layer of experts on a GPU computes bf16 and f16, not f32");
  if (options.adapt)
    core::fail(ErrorKind::kUnsupported, "adapt: nothing is put, and so nothing adapted, on GPUs yet");
  if (options.overlap_if != MoeOverlapIf::kAlways) {
    core::fail(ErrorKind::kUnsupported, "overlap_if is '{}'; on GPUs 'always' is expected",
               name_of(options.overlap_if));
  }
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

void MoeLayer::State::require_host(const char* what) const {
  if (device != nullptr)
    core::fail(ErrorKind::kUnsupported, "{} of a layer of experts is on CPUs only", what);
}

void* MoeLayer::State::reserve_on_device(MoeDevice::Buffer buffer, std::int64_t elements, void* stream) {
  void* const memory = device->reserve(buffer, elements * element());
  if (options.poison_workspace) device->poison(buffer, stream);
  return memory;
}

void MoeLayer::State::run_on_device(PreparedPlan& plan, const DeviceGemm& gemm, void* stream,
                                    Timeline* timeline) {
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
  context.executor().execute(plan, operands, Mode::kRun, timeline);
}

void MoeLayer::State::forward_on_device(const DeviceCall& on, const MoeWeights& weights, Timeline* timeline) {
  using Buffer = MoeDevice::Buffer;
  const std::int64_t middle = activation().hidden_cols();
  const std::int64_t expert_rows = call->layout.rows;
  device_stream = on.stream;
  device->set_rows(make_tables(call->routing, call->rows, call->places));
  const auto reserve = [&](Buffer buffer, std::int64_t elements) {
    return reserve_on_device(buffer, elements, on.stream);
  };
  void* const first_rows = reserve(Buffer::kRows, call->places.num_rows * options.hidden);
  void* const hidden_rows = reserve(Buffer::kHidden, expert_rows * middle);
  void* const activated_rows = reserve(Buffer::kActivated, expert_rows * options.intermediate);
  void* const result_rows = reserve(Buffer::kResults, call->layout.send_rows * options.hidden);
  device->gather(on.x, on.ldx, options.hidden, options.dtype, false, first_rows, on.stream);
  run_on_device(*forward_plans.dispatch,
                {.a = first_rows, .lda = options.hidden, .b = weights.up, .out = hidden_rows, .ldo = middle},
                on.stream, timeline);
  device->activate(hidden_rows, expert_rows, options.intermediate, options.activation, options.gated,
                   options.dtype, activated_rows, on.stream);
  run_on_device(combine_of(forward_plans),
                {.a = activated_rows,
                 .lda = options.intermediate,
                 .b = weights.down,
                 .out = result_rows,
                 .ldo = options.hidden},
                on.stream, timeline);
  device->reduce(result_rows, options.hidden, options.dtype, true, on.out, on.ldo, on.stream);
  device->end(on.stream);
}

}  // namespace flashoverlap

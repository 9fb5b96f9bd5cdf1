#include <algorithm>
#include <limits>

#include "core/fail.h"
#include "ops/moe_state.h"
#include "plan/moe_device.h"

/// The forward where the rows of a layer lie in a device's memory: the same plans, everything in one stream.
namespace flashoverlap {
namespace {

using plan::MoeDevice;
using plan::MoeRowTables;

std::int32_t narrow(std::int64_t row) {
  return static_cast<std::int32_t>(row);
}

MoeRowTables make_tables(const MoeRouting& routing, const ops::SendRows& rows, const ops::RowPlaces& places) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (places.num_rows > kMost || routing.tokens > kMost) {
    core::fail(ErrorKind::kUnsupported, "{} rows and {} tokens on one rank; at most {} are expected on a GPU",
               places.num_rows, routing.tokens, kMost);
  }
  MoeRowTables tables;
  tables.tokens = routing.tokens;
  tables.top_k = routing.top_k;
  tables.weight = routing.weights;
  tables.token.resize(rows.token.size());
  tables.place.resize(places.of_send_row.size());
  tables.result.resize(rows.row.size());
  std::ranges::transform(rows.token, tables.token.begin(), narrow);
  std::ranges::transform(places.of_send_row, tables.place.begin(), narrow);
  std::ranges::transform(rows.row, tables.result.begin(), narrow);
  for (const auto& [first, last] : places.padding) {
    for (std::int64_t row = first; row < last; ++row) {
      tables.token.push_back(-1);
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

void MoeLayer::State::check_device_memory(const DeviceCall& on, std::int64_t tokens,
                                          const MoeWeights& weights) const {
  if (device == nullptr) return;
  if (tokens * options.hidden > 0) {
    device->check_address("x", on.x);
    device->check_address("out", on.out);
  }
  if (count * options.hidden * options.intermediate > 0) {
    device->check_address("up weights", weights.up);
    device->check_address("down weights", weights.down);
  }
}

void MoeLayer::State::require_host(const char* what) const {
  if (device != nullptr)
    core::fail(ErrorKind::kUnsupported, "{} of a layer of experts is on CPUs only", what);
}

void MoeLayer::State::forward_on_device(const DeviceCall& on, const MoeWeights& weights, Timeline* timeline) {
  using Buffer = MoeDevice::Buffer;
  const std::int64_t middle = activation().hidden_cols();
  const std::int64_t expert_rows = call->layout.rows;
  device->set_rows(make_tables(call->routing, call->rows, call->places));
  const auto reserve = [&](Buffer buffer, std::int64_t elements) {
    void* const memory = device->reserve(buffer, elements * element());
    if (options.poison_workspace) device->poison(buffer, on.stream);
    return memory;
  };
  void* const first_rows = reserve(Buffer::kRows, call->places.num_rows * options.hidden);
  void* const hidden_rows = reserve(Buffer::kHidden, expert_rows * middle);
  void* const activated_rows = reserve(Buffer::kActivated, expert_rows * options.intermediate);
  void* const result_rows = reserve(Buffer::kResults, call->layout.send_rows * options.hidden);
  // What a rank without experts passes as weights: nobody reads it.
  const void* const nothing_here =
      count > 0 ? nullptr
                : reserve(Buffer::kNothing, std::max(middle, options.intermediate) * options.hidden);
  const auto run = [&](PreparedPlan& plan, const void* a, std::int64_t lda, const void* b, void* out,
                       std::int64_t ldo) {
    Operands operands;
    operands.a = a;
    operands.lda = lda;
    operands.b = count > 0 ? b : nothing_here;
    operands.ldb = lda;
    operands.out = out;
    operands.ldo = ldo;
    operands.stream = on.stream;
    context.executor().execute(plan, operands, Mode::kRun, timeline);
  };
  device->gather(on.x, on.ldx, options.hidden, options.dtype, first_rows, on.stream);
  run(*forward_plans.dispatch, first_rows, options.hidden, weights.up, hidden_rows, middle);
  device->activate(hidden_rows, expert_rows, options.intermediate, options.activation, options.gated,
                   options.dtype, activated_rows, on.stream);
  run(combine_of(forward_plans), activated_rows, options.intermediate, weights.down, result_rows,
      options.hidden);
  device->reduce(result_rows, options.hidden, options.dtype, on.out, on.ldo, on.stream);
  device->end(on.stream);
}

}  // namespace flashoverlap

#include "moe_layer_call.h"

#include <algorithm>
#include <cmath>

#include "gpu_test.h"
#include "lateness.h"

namespace flashoverlap::gpu_test {

LayerCall::LayerCall(Rank& rank, const MoeCase& call)
    : rank_(rank),
      call_(call),
      layer_(std::make_unique<MoeLayer>(*rank.context, call.options)),
      model_(model_of(call)),
      values_(tokens_of(call, rank.rank)),
      x_(on_device(values_, 0, routing().tokens, call.options.hidden, 8)),
      up_(on_device(model_.up, layer_->first_expert() * model_.middle() * call.options.hidden,
                    layer_->local_experts() * model_.middle(), call.options.hidden)),
      down_(on_device(model_.down, layer_->first_expert() * call.options.hidden * call.options.intermediate,
                      layer_->local_experts() * call.options.hidden, call.options.intermediate)) {}

double LayerCall::run_for_error(Method method) {
  const DeviceMatrix out = make_out();
  (void)enqueue(routing(), out, method);
  rank_.stream->synchronize();
  return error_of(out);
}

void LayerCall::use(std::int64_t consumers, std::int64_t segment_bands) {
  MoeLayerOptions options = call_.options;
  options.consumers = consumers;
  options.segment_bands = segment_bands;
  layer_ = std::make_unique<MoeLayer>(*rank_.context, options);
}

void LayerCall::run_and_check(Method method) {
  const DeviceMatrix out = make_out();
  (void)enqueue(routing(), out, method);
  rank_.stream->synchronize();
  check(out, routing(), method);
}

void LayerCall::run_in_a_row_and_check(const std::vector<MoeRouting>& others, int rounds,
                                       const std::function<void()>& delay) {
  std::vector<DeviceMatrix> outs;
  for (std::size_t i = 0; i < others.size(); ++i) outs.push_back(make_out());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < others.size(); ++i) {
      if (delay) delay();
      (void)enqueue(others[i], outs[i], Method::kOverlap);
    }
  }
  rank_.stream->synchronize();
  for (std::size_t i = 0; i < others.size(); ++i) check(outs[i], others[i], Method::kOverlap);
}

DeviceMatrix LayerCall::make_out() const {
  return {routing().tokens, call_.options.hidden, call_.options.hidden + 8, call_.options.dtype};
}

MoeReport LayerCall::enqueue(const MoeRouting& routing, const DeviceMatrix& out, Method method) {
  return layer_->forward(x_.data(), x_.ld(), routing, {.up = up_.data(), .down = down_.data()}, out.data(),
                         out.ld(), method, nullptr, rank_.native_stream());
}

double LayerCall::error_of(const DeviceMatrix& out) {
  if (!expected_) expected_ = test::reference_forward(model_, routing(), values_.exact);
  const std::vector<float> got = out.read();
  double largest = 0;
  double error = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::abs((*expected_)[i]));
    const double difference = std::abs(static_cast<double>(got[i]) - (*expected_)[i]);
    if (!(difference <= error)) error = difference;  // NaN too
  }
  return error > 0 || std::isnan(error) ? error / largest : 0;
}

// 8e-3 of the largest element, as the issue has it: rows are rounded to 16 bits between the GEMMs.
void LayerCall::check(const DeviceMatrix& out, const MoeRouting& routing, Method method) const {
  const std::vector<float> got = out.read();
  const test::Doubles expected = test::reference_forward(model_, routing, values_.exact);
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - expected[i]);
    GPU_EXPECT(error <= 8e-3 * largest, (method == Method::kSerial ? "serial" : "overlapped")
                                            << ", rank " << rank_.rank << ", element " << i << " is "
                                            << got[i] << ", expected " << expected[i] << ": "
                                            << call_.text());
  }
}

void run_late_calls_in_a_row(Rank& rank, const MoeCase& call) {
  std::vector<MoeRouting> routings;
  for (std::uint64_t i = 0; i < 6; ++i) {
    routings.push_back(
        make_routing(static_cast<RoutingKind>(i % 3), rank.rank, rank.world_size, 50, 4, 2, 10 + i));
  }
  Lateness delay(rank, static_cast<std::uint64_t>(rank.world_size));
  LayerCall(rank, call).run_in_a_row_and_check(routings, 4, std::ref(delay));
}

}  // namespace flashoverlap::gpu_test

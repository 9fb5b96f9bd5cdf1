#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>

#include "layers/layer.h"

/// Layers of random shapes, for tests on CPUs and on GPUs.
namespace flashoverlap::test {

enum class LayerKind { kMlpTpsp, kLinearDp, kAttentionTpsp, kAttentionUp };
constexpr LayerKind kLayerKinds[] = {LayerKind::kMlpTpsp, LayerKind::kLinearDp, LayerKind::kAttentionTpsp,
                                     LayerKind::kAttentionUp};

struct LayerCase {
  std::string text;
  std::function<std::unique_ptr<layers::Layer>(layers::Place&)> make;
};

/// Shapes of layers for `world` ranks: any number of rows, and of columns mostly multiples of 8, which GPUs
/// have their own kernels for.
class LayerShapes {
 public:
  LayerShapes(std::uint64_t seed, std::int64_t world) : rng_(seed), world_(world) {}

  LayerCase pick_case(LayerKind kind) {
    switch (kind) {
      case LayerKind::kMlpTpsp:
        return mlp();
      case LayerKind::kLinearDp:
        return linear();
      case LayerKind::kAttentionTpsp:
        return attention(true);
      case LayerKind::kAttentionUp:
        break;
    }
    return attention(false);
  }

  std::int64_t pick(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng_);
  }

 private:
  std::int64_t cols(std::int64_t most) { return pick(0, 3) == 0 ? pick(8, 8 * most) : 8 * pick(1, most); }

  LayerCase mlp() {
    const layers::MlpShape shape{.tokens = pick(1, 600), .hidden = cols(24), .inner = world_ * cols(20)};
    const Common common = pick_common();
    return {text_of("mlp-tpsp", {shape.tokens, shape.hidden, shape.inner}, common),
            [=](layers::Place& place) {
              return layers::make_mlp_tpsp(place, shape, common.seed, common.baseline);
            }};
  }

  LayerCase linear() {
    const layers::LinearShape shape{.samples = cols(30), .in = cols(24), .out = pick(1, 300)};
    const Common common = pick_common();
    return {text_of("linear-dp", {shape.samples, shape.in, shape.out}, common), [=](layers::Place& place) {
              return layers::make_linear_dp(place, shape, common.seed, common.baseline);
            }};
  }

  LayerCase attention(bool tpsp) {
    const layers::AttentionShape shape{.tokens = pick(1, 400),
                                       .heads = tpsp ? world_ * pick(1, 3) : pick(1, 8),
                                       .head_size = 8 * pick(1, 8)};
    const Common common = pick_common();
    return {text_of(tpsp ? "attention-tpsp" : "attention-up", {shape.tokens, shape.heads, shape.head_size},
                    common),
            [=](layers::Place& place) {
              return tpsp ? layers::make_attention_tpsp(place, shape, common.seed, common.baseline)
                          : layers::make_attention_up(place, shape, common.seed);
            }};
  }

  struct Common {
    std::uint64_t seed = 1;
    BaselineOptions baseline;
  };
  Common pick_common() {
    return {.seed = static_cast<std::uint64_t>(pick(1, 1000)), .baseline = {.num_slices = pick(0, 3)}};
  }

  [[nodiscard]] std::string text_of(const char* name, std::initializer_list<std::int64_t> sizes,
                                    const Common& common) const {
    std::ostringstream text;
    text << name;
    for (const std::int64_t size : sizes) text << " " << size;
    text << ", " << world_ << " ranks, " << common.baseline.num_slices << " slices, seed " << common.seed;
    return text.str();
  }

  std::mt19937_64 rng_;
  std::int64_t world_;
};

/// What is wrong with the result of the layer's last call; empty: nothing.
inline std::string fault_of(const layers::Layer& layer, Method method) {
  const double error = layer.error(method);
  if (error <= layer.largest_error()) return {};
  std::ostringstream text;
  text << "method " << static_cast<int>(method) << ": error " << error << ", expected at most "
       << layer.largest_error();
  return text.str();
}

/// Calls the layer by every method on poisoned outputs, by the plan again at the end, with calls in between
/// that measure its parts. Returns what is wrong; empty: nothing.
inline std::string fault_of_any_method(layers::Layer& layer) {
  for (const Method method : {Method::kOverlap, Method::kSerial, Method::kSliced, Method::kOverlap}) {
    if (method == Method::kSliced && !layer.has_sliced()) continue;
    layer.poison();
    layer.run(method);
    if (std::string fault = fault_of(layer, method); !fault.empty()) return fault;
    layer.run(method, Mode::kPlainGemm, nullptr);
    layer.run(method, Mode::kCommunicationOnly, nullptr);
  }
  return {};
}

}  // namespace flashoverlap::test

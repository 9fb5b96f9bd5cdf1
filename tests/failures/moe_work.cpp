#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "failures/work.h"
#include "flashoverlap/moe_layer.h"

namespace flashoverlap::test {
namespace {

constexpr std::int64_t kTokens = 96;
constexpr std::int64_t kHidden = 16;
constexpr std::int64_t kIntermediate = 32;
constexpr std::int64_t kExperts = 8;
constexpr std::int32_t kTopK = 2;

/// By collectives, which every communicator has.
MoeLayerOptions layer_options(bool is_wrong) {
  return {.hidden = kHidden,
          .intermediate = kIntermediate,
          .num_experts = kExperts,
          .gated = false,
          .activation = Activation::kNone,
          .tile_m = is_wrong ? 32 : 16,
          .tile_n = 16,
          .transport = MoeTransport::kCollective,
          .collective_groups = 3,
          .poison_workspace = true};
}

/// Token t of rank r is all r + 1 and goes to experts t and t + 1 (modulo kExperts); expert e multiplies the
/// sum of a token by kIntermediate * (e + 1).
class MoeWork : public Work {
 public:
  MoeWork(Context& context, bool is_wrong)
      : layer_(context, layer_options(is_wrong)),
        token_(static_cast<float>(context.communicator().rank() + 1)),
        x_(kTokens * kHidden, token_),
        out_(kTokens * kHidden),
        up_(static_cast<std::size_t>(layer_.local_experts() * kIntermediate * kHidden), 1.0F),
        down_(up_.size()) {
    constexpr std::int64_t kWeights = kHidden * kIntermediate;
    for (std::size_t i = 0; i < down_.size(); ++i) {
      const std::int64_t expert = layer_.first_expert() + static_cast<std::int64_t>(i) / kWeights;
      down_[i] = static_cast<float>(expert + 1);
    }
    routing_ = {.tokens = kTokens, .num_experts = kExperts, .top_k = kTopK, .experts = {}, .weights = {}};
    routing_.weights.assign(kTokens * kTopK, 1.0F);
    for (std::int32_t token = 0; token < kTokens; ++token) {
      for (std::int32_t slot = 0; slot < kTopK; ++slot)
        routing_.experts.push_back(static_cast<std::int32_t>((token + slot) % kExperts));
    }
  }

  void call() override {
    std::fill(out_.begin(), out_.end(), -1.0F);
    const MoeWeights weights{.up = up_.data(), .down = down_.data()};
    layer_.forward(x_.data(), kHidden, routing_, weights, out_.data(), kHidden);
    for (std::int64_t token = 0; token < kTokens; ++token) {
      const std::int64_t experts = token % kExperts + 1 + (token + 1) % kExperts + 1;
      const float expected = token_ * static_cast<float>(kHidden * kIntermediate * experts);
      const auto row = out_.begin() + token * kHidden;
      if (!std::all_of(row, row + kHidden, [&](float value) { return value == expected; })) {
        throw std::logic_error("a result is wrong");
      }
    }
  }

 private:
  MoeLayer layer_;
  float token_;
  MoeRouting routing_;
  std::vector<float> x_;
  std::vector<float> out_;
  std::vector<float> up_;
  std::vector<float> down_;
};

}  // namespace

std::unique_ptr<Work> make_moe_work(Context& context, bool is_wrong) {
  return std::make_unique<MoeWork>(context, is_wrong);
}

}  // namespace flashoverlap::test

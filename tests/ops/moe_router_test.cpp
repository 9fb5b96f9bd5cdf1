#include "flashoverlap/moe_router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "flashoverlap/moe_routing.h"
#include "ops/moe_reference.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap::test {
namespace {

using MoeRouterTest = SeededTest;
using testing::HasSubstr;

TEST_F(MoeRouterTest, GradientsAreTheDenseReference) {
  for (int round = 0; round < 40; ++round) {
    MoeRouterBackward call;
    call.tokens = pick(0, 3) == 0 ? pick(250, 520) : pick(0, 20);  // 256 are taken at a time
    call.hidden = pick(0, 30);
    call.num_experts = pick(1, 12);
    call.dtype = static_cast<DType>(pick(0, 2));
    SCOPED_TRACE(testing::Message() << call.tokens << " tokens, hidden " << call.hidden << ", "
                                    << call.num_experts << " experts, " << name_of(call.dtype));
    call.ldx = call.hidden + pick(0, 3);
    call.gate_ld = call.hidden + pick(0, 3);
    call.input_ld = call.hidden + pick(0, 3);
    const Values x = random_values(rng_, call.tokens * call.ldx, call.dtype, 1);
    const Values gate = random_values(rng_, call.num_experts * call.gate_ld, call.dtype, 1);
    Values input = random_values(rng_, call.tokens * call.input_ld, call.dtype, 1);
    const Values logit = random_values(rng_, call.tokens * call.num_experts, DType::kFloat32, 1);
    for (const double value : logit.exact) call.logit_gradient.push_back(static_cast<float>(value));
    Doubles by_gate(at(call.num_experts * call.hidden), 0);
    Doubles by_input = input.exact;  // with what lies between the rows
    for (std::int64_t t = 0; t < call.tokens; ++t) {
      for (std::int64_t e = 0; e < call.num_experts; ++e) {
        for (std::int64_t h = 0; h < call.hidden; ++h) {
          const double g = logit.exact[at(t * call.num_experts + e)];
          by_gate[at(e * call.hidden + h)] += g * x.exact[at(t * call.ldx + h)];
          by_input[at(t * call.input_ld + h)] += g * gate.exact[at(e * call.gate_ld + h)];
        }
      }
    }
    std::vector<float> got(by_gate.size(), NAN);
    call.x = x.bytes.data();
    call.gate = gate.bytes.data();
    call.gate_gradient = got.data();
    call.input_gradient = input.bytes.data();
    router_backward(call);
    EXPECT_LE(relative_error(by_gate, [&](std::int64_t i) { return got[at(i)]; }), 1e-5);
    // One rounding to the type.
    const double tolerance = call.dtype == DType::kFloat32   ? 1e-5
                             : call.dtype == DType::kFloat16 ? 1e-3
                                                             : 8e-3;
    EXPECT_LE(relative_error(by_input, [&](std::int64_t i) { return input.get(i); }), tolerance);
  }
}

/// From the gate's weights to a loss that is linear in the routing's weights, in float64; the choice of
/// experts is `routing`'s.
double loss_of(const Doubles& gate, const Doubles& x, std::int64_t hidden, const GateOptions& options,
               const MoeRouting& routing, const std::vector<float>& by_weights) {
  double loss = 0;
  for (std::int64_t t = 0; t < routing.tokens; ++t) {
    Doubles scores(at(routing.num_experts), 0);
    double all = 0;
    for (std::int64_t e = 0; e < routing.num_experts; ++e) {
      double logit = 0;
      for (std::int64_t h = 0; h < hidden; ++h) logit += x[at(t * hidden + h)] * gate[at(e * hidden + h)];
      scores[at(e)] =
          options.function == GateFunction::kSoftmax ? std::exp(logit) : 1 / (1 + std::exp(-logit));
      all += scores[at(e)];
    }
    double chosen = 0;
    for (std::int32_t s = 0; s < routing.top_k; ++s) chosen += scores[at(routing.expert(t, s))];
    const double softmax = options.function == GateFunction::kSoftmax ? all : 1;
    for (std::int32_t s = 0; s < routing.top_k; ++s) {
      loss += static_cast<double>(by_weights[at(t * routing.top_k + s)]) * scores[at(routing.expert(t, s))] /
              (options.renormalise ? chosen : softmax);
    }
  }
  return loss;
}

TEST_F(MoeRouterTest, GradientsAreTheDifferences) {
  constexpr std::int64_t kTokens = 5;
  constexpr std::int64_t kHidden = 4;
  constexpr std::int64_t kExperts = 6;
  for (const GateFunction function : {GateFunction::kSoftmax, GateFunction::kSigmoid}) {
    for (const bool renormalise : {false, true}) {
      const GateOptions options{.function = function, .top_k = 3, .renormalise = renormalise};
      const Values x = random_values(rng_, kTokens * kHidden, DType::kFloat32, 1);
      const Values gate = random_values(rng_, kExperts * kHidden, DType::kFloat32, 1);
      Values logits(kTokens * kExperts, DType::kFloat32);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        for (std::int64_t e = 0; e < kExperts; ++e) {
          double sum = 0;
          for (std::int64_t h = 0; h < kHidden; ++h) {
            sum += x.exact[at(t * kHidden + h)] * gate.exact[at(e * kHidden + h)];
          }
          logits.set(t * kExperts + e, static_cast<float>(sum));
        }
      }
      const MoeRouting routing =
          route_tokens(logits.bytes.data(), kExperts, kTokens, kExperts, DType::kFloat32, options);
      std::vector<float> by_weights;
      for (std::int64_t i = 0; i < kTokens * 3; ++i) by_weights.push_back(static_cast<float>(pick(-9, 9)));
      std::vector<float> by_gate(at(kExperts * kHidden), NAN);
      Values by_input(kTokens * kHidden, DType::kFloat32);
      router_backward({.tokens = kTokens,
                       .hidden = kHidden,
                       .num_experts = kExperts,
                       .logit_gradient = route_gradient(logits.bytes.data(), kExperts, DType::kFloat32,
                                                        options, routing, by_weights),
                       .x = x.bytes.data(),
                       .ldx = kHidden,
                       .gate = gate.bytes.data(),
                       .gate_ld = kHidden,
                       .gate_gradient = by_gate.data(),
                       .input_gradient = by_input.bytes.data(),
                       .input_ld = kHidden});
      Doubles w = gate.exact;
      Doubles in = x.exact;
      const auto difference = [&](double& variable) {
        constexpr double kStep = 1e-5;
        const double value = variable;
        variable = value + kStep;
        const double above = loss_of(w, in, kHidden, options, routing, by_weights);
        variable = value - kStep;
        const double below = loss_of(w, in, kHidden, options, routing, by_weights);
        variable = value;
        return (above - below) / (2 * kStep);
      };
      // Logits and gradients pass through float32; by_weights go up to 9.
      for (std::size_t i = 0; i < w.size(); ++i) EXPECT_NEAR(by_gate[i], difference(w[i]), 2e-5) << i;
      for (std::size_t i = 0; i < in.size(); ++i) {
        EXPECT_NEAR(by_input.get(static_cast<std::int64_t>(i)), difference(in[i]), 2e-5) << i;
      }
    }
  }
}

TEST(MoeRouterErrors, NameWhatDoesNotFit) {
  const auto message = [](const auto& change) {
    float numbers[16] = {};
    MoeRouterBackward call{.tokens = 2, .hidden = 3, .num_experts = 2, .logit_gradient = {1, 2, 3, 4}};
    call.x = call.gate = numbers;
    call.input_gradient = call.gate_gradient = numbers;
    call.ldx = call.gate_ld = call.input_ld = 3;
    change(call);
    return message_of(ErrorKind::kBadArgument, [&] { router_backward(call); });
  };
  EXPECT_THAT(message([](auto& c) { c.tokens = -1; }), HasSubstr("tokens is -1; at least 0 is expected"));
  EXPECT_THAT(message([](auto& c) { c.num_experts = 0; }), HasSubstr("num_experts is 0; at least 1"));
  EXPECT_THAT(message([](auto& c) { c.logit_gradient.pop_back(); }),
              HasSubstr("logit_gradient has 3 numbers; 2 tokens x 2 experts are expected"));
  EXPECT_THAT(message([](auto& c) { c.ldx = 2; }), HasSubstr("ldx is 2; at least 3 is expected"));
  EXPECT_THAT(message([](auto& c) { c.gate_ld = 1; }), HasSubstr("gate_ld is 1; at least 3 is expected"));
  EXPECT_THAT(message([](auto& c) { c.gate = nullptr; }), HasSubstr("the matrix with gate_ld 3 is null"));
}

}  // namespace
}  // namespace flashoverlap::test

#include "flashoverlap/moe_routing.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "flashoverlap/moe_plan.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

MoeRouting route(const std::vector<float>& logits, std::int64_t experts, const GateOptions& options) {
  return route_tokens(logits.data(), experts, std::ssize(logits) / experts, experts, DType::kFloat32,
                      options);
}

TEST(RouteTokens, SoftmaxByHand) {
  // exp(0) : exp(ln 2) : exp(ln 5) = 1 : 2 : 5
  const std::vector<float> logits = {0, std::log(2.0F), std::log(5.0F), 7, 7, 7};
  const MoeRouting plain = route(logits, 3, {.top_k = 2});
  EXPECT_THAT(plain.experts, ElementsAre(2, 1, 0, 1)) << "of equal scores the lower expert comes first";
  const float expected[] = {5.0F / 8, 2.0F / 8, 1.0F / 3, 1.0F / 3};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(plain.weights[i], expected[i], 1e-7F) << i;
  const MoeRouting renormalised = route(logits, 3, {.top_k = 2, .renormalise = true});
  EXPECT_EQ(renormalised.experts, plain.experts);
  const float of_chosen[] = {5.0F / 7, 2.0F / 7, 0.5F, 0.5F};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(renormalised.weights[i], of_chosen[i], 1e-7F) << i;
}

TEST(RouteTokens, SigmoidByHand) {
  const MoeRouting r = route({0, -1000, 2}, 3, {.function = GateFunction::kSigmoid, .top_k = 3});
  EXPECT_THAT(r.experts, ElementsAre(2, 0, 1));
  EXPECT_NEAR(r.weights[0], 1 / (1 + std::exp(-2.0F)), 1e-7F);
  EXPECT_EQ(r.weights[1], 0.5F);
  EXPECT_EQ(r.weights[2], 0.0F);
  // A sum of 0 leaves weights 0 instead of NaN.
  const MoeRouting zeros =
      route({-2000, -1000}, 2, {.function = GateFunction::kSigmoid, .top_k = 2, .renormalise = true});
  EXPECT_THAT(zeros.experts, ElementsAre(1, 0));
  EXPECT_THAT(zeros.weights, ElementsAre(0.0F, 0.0F));
}

TEST(RouteTokens, ClosedExpertsAreNeverChosen) {
  const MoeRouting r = route({-kInfinity, 3, -kInfinity, -kInfinity, -kInfinity, -kInfinity}, 3,
                             {.top_k = 2, .renormalise = true});
  EXPECT_THAT(r.experts, ElementsAre(1, -1, -1, -1));
  EXPECT_THAT(r.weights, ElementsAre(1.0F, 0.0F, 0.0F, 0.0F));
}

TEST(RouteTokens, NoTokens) {
  const MoeRouting r = route_tokens(nullptr, 4, 0, 4, DType::kFloat16, {.top_k = 2});
  EXPECT_EQ(r.tokens, 0);
  EXPECT_TRUE(r.experts.empty());
  check_routing(r);
}

TEST(RouteTokens, Errors) {
  const auto message = [](const std::vector<float>& logits, const GateOptions& options) {
    return test::message_of(ErrorKind::kBadArgument, [&] { static_cast<void>(route(logits, 2, options)); });
  };
  EXPECT_THAT(message({0, 0, 0, NAN}, {}),
              HasSubstr("logit of token 1 for expert 1 is nan; a number, or -infinity"));
  EXPECT_THAT(message({kInfinity, 0}, {}), HasSubstr("logit of token 0 for expert 0 is inf"));
  EXPECT_THAT(message({0, 0}, {.top_k = 3}), HasSubstr("top_k is 3, but there are 2 experts"));
  EXPECT_THAT(message({0, 0}, {.top_k = 0}), HasSubstr("top_k 0; at least 1 is expected"));
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "logits is null",
                            static_cast<void>(route_tokens(nullptr, 2, 1, 2, DType::kFloat32, {})));
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "ld of the logits is 1; at least 2",
                            static_cast<void>(route_tokens(nullptr, 1, 1, 2, DType::kFloat32, {})));
}

using RouteGradient = test::SeededTest;

TEST_F(RouteGradient, IsTheDifferenceQuotient) {
  for (int round = 0; round < 24; ++round) {
    const std::int64_t experts = pick(1, 7);
    const GateOptions options{.function = round % 2 == 0 ? GateFunction::kSoftmax : GateFunction::kSigmoid,
                              .top_k = static_cast<std::int32_t>(pick(1, experts)),
                              .renormalise = round % 4 < 2};
    std::uniform_real_distribution<float> uniform(-2, 2);
    std::vector<float> logits(static_cast<std::size_t>(2 * experts));
    for (float& logit : logits) logit = uniform(rng_);
    const MoeRouting routing = route(logits, experts, options);
    std::vector<float> by_weight(routing.weights.size());
    for (float& gradient : by_weight) gradient = uniform(rng_);
    const std::vector<float> gradient =
        route_gradient(logits.data(), experts, DType::kFloat32, options, routing, by_weight);
    // The same choice, in float64.
    const auto loss = [&](const std::vector<double>& l) {
      double sum = 0;
      for (std::int64_t t = 0; t < 2; ++t) {
        const auto score = [&](std::int64_t e) {
          const double x = l[static_cast<std::size_t>(t * experts + e)];
          if (options.function == GateFunction::kSigmoid) return 1 / (1 + std::exp(-x));
          double all = 0;
          for (std::int64_t i = 0; i < experts; ++i)
            all += std::exp(l[static_cast<std::size_t>(t * experts + i)]);
          return std::exp(x) / all;
        };
        double chosen = 0;
        for (std::int32_t s = 0; s < options.top_k; ++s) chosen += score(routing.expert(t, s));
        for (std::int32_t s = 0; s < options.top_k; ++s) {
          const double weight = score(routing.expert(t, s)) / (options.renormalise ? chosen : 1);
          sum += weight * static_cast<double>(by_weight[static_cast<std::size_t>(t * options.top_k + s)]);
        }
      }
      return sum;
    };
    std::vector<double> exact(logits.begin(), logits.end());
    for (std::size_t i = 0; i < exact.size(); ++i) {
      constexpr double kStep = 1e-6;
      const double value = exact[i];
      exact[i] = value + kStep;
      const double above = loss(exact);
      exact[i] = value - kStep;
      const double below = loss(exact);
      exact[i] = value;
      EXPECT_NEAR(gradient[i], (above - below) / (2 * kStep), 1e-6) << "round " << round << ", logit " << i;
    }
  }
}

TEST(MadeRouting, BalancedGivesEveryExpertTheSame) {
  for (const std::int32_t world : {1, 4}) {
    for (const std::int64_t experts : {8, 12, 64}) {
      std::vector<std::int64_t> total(static_cast<std::size_t>(experts), 0);
      for (std::int32_t rank = 0; rank < world; ++rank) {
        const auto rows = count_rows(make_routing(RoutingKind::kBalanced, rank, world, 96, experts, 2, 1));
        for (std::size_t e = 0; e < rows.size(); ++e) total[e] += rows[e];
      }
      for (const std::int64_t rows : total) EXPECT_EQ(rows, 96 * 2 * world / experts);
    }
  }
}

TEST(MadeRouting, StressSendsHalfToOneRank) {
  std::int64_t hot = 0;
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    const auto rows = count_rows(make_routing(RoutingKind::kStress, rank, 4, 1000, 64, 2, 3));
    for (std::int64_t e = 0; e < first_expert(64, 4, 1); ++e) hot += rows[static_cast<std::size_t>(e)];
  }
  EXPECT_NEAR(static_cast<double>(hot) / 8000, 0.5, 0.05);
}

TEST(MadeRouting, ExpertsOfATokenAreDistinctAndWeightsSumToOne) {
  for (const RoutingKind kind : {RoutingKind::kBalanced, RoutingKind::kModerate, RoutingKind::kStress}) {
    const MoeRouting r = make_routing(kind, 1, 3, 50, 9, 9, 5);
    check_routing(r);
    EXPECT_EQ(r.experts, make_routing(kind, 1, 3, 50, 9, 9, 5).experts);
    for (std::int64_t t = 0; t < r.tokens; ++t) {
      std::set<std::int32_t> experts;
      float sum = 0;
      for (std::int32_t s = 0; s < r.top_k; ++s) {
        experts.insert(r.expert(t, s));
        sum += r.weight(t, s);
      }
      EXPECT_EQ(experts.size(), 9U) << name_of(kind) << " token " << t;
      EXPECT_NEAR(sum, 1, 1e-6);
    }
  }
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "top_k is 3, but there are 2 experts",
                            static_cast<void>(make_routing(RoutingKind::kBalanced, 0, 1, 1, 2, 3, 1)));
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "routing 'even' is not known",
                            static_cast<void>(parse_routing_kind("even")));
}

}  // namespace
}  // namespace flashoverlap

#include "flashoverlap/moe_layer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <mutex>
#include <thread>

#include "flashoverlap/launcher.h"
#include "ops/moe_reference.h"
#include "support/ops_call.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap::test {
namespace {

using MoeLayerTest = SeededTest;

MoeRouting random_routing(std::mt19937_64& rng, std::int64_t tokens, std::int64_t experts, std::int32_t top_k,
                          bool odd) {
  MoeRouting routing{tokens, experts, top_k, {}, {}};
  std::uniform_int_distribution<std::int32_t> any(odd ? -1 : 0, static_cast<std::int32_t>(experts - 1));
  std::uniform_int_distribution<int> few(0, 3);
  std::uniform_real_distribution<float> weight(-1, 1);
  const std::int32_t favourite = any(rng);
  for (std::int64_t i = 0; i < tokens * top_k; ++i) {
    routing.experts.push_back(few(rng) == 0 ? favourite : any(rng));
    routing.weights.push_back(routing.experts.back() < 0 ? NAN : weight(rng));
  }
  return routing;
}

struct Case {
  int world_size = 1;
  MoeLayerOptions options;
  std::int32_t top_k = 1;
  std::vector<std::int64_t> tokens;  ///< By rank.
  int threads = 1;

  [[nodiscard]] std::string text() const {
    return fmt::format(
        "W={} H={} I={} E={} K={} tile={}x{} x={} consumers={} {} {} {} {} threads={} tokens {}", world_size,
        options.hidden, options.intermediate, options.num_experts, top_k, options.tile_m, options.tile_n,
        options.segment_bands, options.consumers, name_of(options.dtype), name_of(options.padding),
        name_of(options.order), name_of(options.transport), threads, fmt::join(tokens, " "));
  }
};

constexpr std::array<std::tuple<MoePadding, MoeOrder, MoeTransport>, 6> kLayouts = {{
    {MoePadding::kRagged, MoeOrder::kOwnerMajor, MoeTransport::kPut},
    {MoePadding::kRagged, MoeOrder::kExpertMajor, MoeTransport::kPut},
    {MoePadding::kPaper, MoeOrder::kExpertMajor, MoeTransport::kPut},
    {MoePadding::kPaper, MoeOrder::kOwnerMajor, MoeTransport::kPut},
    {MoePadding::kShared, MoeOrder::kExpertMajor, MoeTransport::kPut},
    {MoePadding::kRagged, MoeOrder::kOwnerMajor, MoeTransport::kCollective},
}};

class RandomCases : public SeededTest {
 protected:
  Case random_case() {
    Case c;
    c.world_size = static_cast<int>(pick(1, 5));
    c.options.num_experts = pick(1, 7);
    c.options.hidden = pick(1, 40);
    c.options.intermediate = pick(1, 24);
    c.options.gated = pick(0, 3) != 0;
    c.options.activation = c.options.gated ? Activation::kSilu : static_cast<Activation>(pick(0, 3));
    c.options.dtype = static_cast<DType>(pick(0, 2));
    c.options.tile_m = pick(1, 9);
    c.options.tile_n = pick(1, 20);
    c.options.segment_bands = pick(1, 3);
    c.options.consumers = pick(1, 3);
    c.options.collective_groups = pick(1, 4);
    c.options.poison_workspace = true;
    // Processes cannot put, and a job has the ranks that it has.
    const auto launch = detect_launch();
    const bool is_job = launch && launch->world_size > 1;
    if (is_job) c.world_size = static_cast<int>(pick(1, launch->world_size));
    std::tie(c.options.padding, c.options.order, c.options.transport) = kLayouts[at(is_job ? 5 : pick(0, 5))];
    c.top_k = static_cast<std::int32_t>(pick(1, 4));
    for (int r = 0; r < c.world_size; ++r) c.tokens.push_back(pick(0, 4) == 0 ? 0 : pick(0, 25));
    c.threads = static_cast<int>(pick(1, 3));
    return c;
  }
};

TEST_F(RandomCases, ForwardIsTheDenseReference) {
  for (int round = 0; round < 60; ++round) {
    const Case c = random_case();
    SCOPED_TRACE(c.text());
    const MoeModel model = random_model(rng_, c.options);
    std::vector<MoeRouting> routings;
    std::vector<Values> inputs;
    for (int r = 0; r < c.world_size; ++r) {
      routings.push_back(random_routing(rng_, c.tokens[at(r)], c.options.num_experts, c.top_k, true));
      inputs.push_back(random_values(rng_, c.tokens[at(r)] * c.options.hidden, c.options.dtype, 1));
    }
    on_ranks(c.world_size,
             [&](Context& context, int rank) {
               MoeLayer layer(context, c.options);
               const std::int64_t h = c.options.hidden;
               const Values& x = inputs[at(rank)];
               Values out(c.tokens[at(rank)] * h, c.options.dtype);
               Values again = out;
               Values serial = out;
               for (Values* to : {&out, &again, &serial}) {
                 to->poison();
                 const Method method = to == &serial ? Method::kSerial : Method::kOverlap;
                 layer.forward(x.bytes.data(), h, routings[at(rank)], weights_of(model, layer),
                               to->bytes.data(), h, method);
               }
               const Doubles expected = reference_forward(model, routings[at(rank)], x.exact);
               EXPECT_LE(relative_error(expected, [&](std::int64_t i) { return out.get(i); }),
                         moe_tolerance(c.options.dtype))
                   << "rank " << rank;
               EXPECT_EQ(out.bytes, again.bytes) << "rank " << rank << ": a second call gives other bits";
               if (c.options.padding == MoePadding::kRagged) {
                 EXPECT_EQ(out.bytes, serial.bytes)
                     << "rank " << rank << ": the serial call gives other bits";
               }
             },
             {.num_threads = c.threads});
    if (HasFailure()) return;
  }
}

TEST_F(RandomCases, BackwardIsTheDenseReference) {
  for (int round = 0; round < 40; ++round) {
    Case c = random_case();
    if (c.options.dtype == DType::kBFloat16) c.options.dtype = DType::kFloat32;
    SCOPED_TRACE(c.text());
    const MoeModel model = random_model(rng_, c.options);
    std::vector<MoeRouting> routings;
    std::vector<Values> inputs;
    std::vector<Values> by_out;
    ReferenceGradients shared;
    std::vector<ReferenceGradients> expected;
    for (int r = 0; r < c.world_size; ++r) {
      const std::int64_t count = c.tokens[at(r)] * c.options.hidden;
      routings.push_back(random_routing(rng_, c.tokens[at(r)], c.options.num_experts, c.top_k, true));
      inputs.push_back(random_values(rng_, count, c.options.dtype, 1));
      by_out.push_back(random_values(rng_, count, c.options.dtype, 1));
      reference_backward(model, routings[at(r)], inputs[at(r)].exact, by_out[at(r)].exact, shared);
      expected.push_back(shared);
    }
    const double tolerance =
        4 * moe_tolerance(c.options.dtype);  // three more roundings in a row than forward
    on_ranks(
        c.world_size,
        [&](Context& context, int rank) {
          MoeLayer layer(context, c.options);
          const std::int64_t h = c.options.hidden;
          const std::size_t r = at(rank);
          Values out(c.tokens[r] * h, c.options.dtype);
          Values input(c.tokens[r] * h, c.options.dtype);
          input.poison();
          const MoeWeights weights = weights_of(model, layer);
          const std::int64_t u = model.middle();
          std::vector<float> by_weights(routings[r].weights.size(), NAN);
          std::vector<float> up(at(layer.local_experts() * u * h), NAN);
          std::vector<float> down(at(layer.local_experts() * h * c.options.intermediate), NAN);
          layer.forward(inputs[r].bytes.data(), h, routings[r], weights, out.bytes.data(), h);
          layer.backward(by_out[r].bytes.data(), h, weights,
                         {input.bytes.data(), h, by_weights.data(), up.data(), down.data()});
          EXPECT_LE(relative_error(expected[r].input, [&](std::int64_t i) { return input.get(i); }),
                    tolerance);
          EXPECT_LE(relative_error(expected[r].weights, [&](std::int64_t i) { return by_weights[at(i)]; }),
                    tolerance);
          const auto part = [](const Doubles& whole, std::int64_t first, std::size_t count) {
            return Doubles(whole.begin() + first, whole.begin() + first + static_cast<std::int64_t>(count));
          };
          EXPECT_LE(relative_error(part(shared.up, layer.first_expert() * u * h, up.size()),
                                   [&](std::int64_t i) { return up[at(i)]; }),
                    tolerance);
          EXPECT_LE(relative_error(
                        part(shared.down, layer.first_expert() * h * c.options.intermediate, down.size()),
                        [&](std::int64_t i) { return down[at(i)]; }),
                    tolerance);
        },
        {.num_threads = c.threads});
    if (HasFailure()) return;
  }
}

/// The reference itself, by central differences in float64.
TEST_F(MoeLayerTest, ReferenceGradientsAreTheDifferences) {
  for (const Activation activation : {Activation::kNone, Activation::kGelu, Activation::kSilu}) {
    MoeLayerOptions options;
    options.hidden = 5;
    options.intermediate = 4;
    options.num_experts = 3;
    options.activation = activation;
    options.gated = activation == Activation::kSilu;
    MoeModel model = random_model(rng_, options);
    MoeRouting routing = random_routing(rng_, 6, 3, 2, true);
    Values x = random_values(rng_, 30, DType::kFloat32, 1);
    const Values by_out = random_values(rng_, 30, DType::kFloat32, 1);
    ReferenceGradients g;
    reference_backward(model, routing, x.exact, by_out.exact, g);
    const auto loss = [&] {
      const Doubles out = reference_forward(model, routing, x.exact);
      double sum = 0;
      for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * by_out.exact[i];
      return sum;
    };
    const auto compare = [&](Doubles& variables, const Doubles& gradient) {
      constexpr double kStep = 1e-5;
      for (std::size_t i = 0; i < variables.size(); ++i) {
        const double value = variables[i];
        variables[i] = value + kStep;
        const double above = loss();
        variables[i] = value - kStep;
        const double below = loss();
        variables[i] = value;
        EXPECT_NEAR((above - below) / (2 * kStep), gradient[i], 1e-8) << i;
      }
    };
    compare(x.exact, g.input);
    compare(model.up.exact, g.up);
    compare(model.down.exact, g.down);
    for (std::size_t i = 0; i < routing.weights.size(); ++i) {  // linear in them
      if (routing.experts[i] < 0) continue;
      const float weight = routing.weights[i];
      routing.weights[i] = 1;
      const double one = loss();
      routing.weights[i] = 0;
      EXPECT_NEAR(one - loss(), g.weights[i], 1e-9) << i;
      routing.weights[i] = weight;
    }
  }
}

}  // namespace
}  // namespace flashoverlap::test

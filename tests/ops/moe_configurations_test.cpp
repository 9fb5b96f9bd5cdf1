#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "flashoverlap/moe_layer.h"
#include "ops/moe_reference.h"
#include "support/ops_call.h"
#include "support/seed.h"

/// The 1440 configurations of arXiv 2607.19539, section 4.5: 3 routings x 12 splits x 2 segment sizes x 20
/// shapes, on 4 ranks in float16, with random delays. FLASHOVERLAP_MOE_CONFIGURATIONS says how many are
/// taken, drawn by the seed; `ctest -C Long` takes all.
namespace flashoverlap::test {
namespace {

constexpr int kConfigurations = 3 * 12 * 2 * 20;
constexpr int kWorldSize = 4;
constexpr double kTolerance = 8e-3;

int num_taken() {
  const char* text = std::getenv("FLASHOVERLAP_MOE_CONFIGURATIONS");
  return text == nullptr ? 16 : std::stoi(text);
}

struct Configuration {
  RoutingKind routing;
  std::int64_t consumers;
  int threads;
  std::int64_t segment_bands;
  std::int64_t hidden;
  std::int64_t intermediate;
  std::int64_t experts;
  std::int32_t top_k;
  std::int64_t tokens;
};

Configuration configuration(int number) {
  const auto digit = [&](int base) {
    const int value = number % base;
    number /= base;
    return value;
  };
  Configuration c{};
  c.routing = static_cast<RoutingKind>(digit(3));
  c.consumers = 1 + digit(4);
  c.threads = 1 + digit(3);
  c.segment_bands = 1 + digit(2);
  const int shape = digit(20);  // widths and heights that fit tiles, and some that do not
  c.hidden = std::array<std::int64_t, 5>{16, 33, 64, 96, 130}[at(shape % 5)];
  c.intermediate = shape % 2 == 0 ? 32 : 45;
  c.experts = shape % 3 == 0 ? 16 : 8;
  c.top_k = shape < 10 ? 2 : 4;
  c.tokens = 40 + 7 * shape;
  return c;
}

/// Runs one configuration and returns its largest relative error.
double run_configuration(const Configuration& c, std::mt19937_64& rng) {
  MoeLayerOptions options;
  options.hidden = c.hidden;
  options.intermediate = c.intermediate;
  options.num_experts = c.experts;
  options.dtype = DType::kFloat16;
  options.tile_m = 16;
  options.tile_n = 32;
  options.padding = MoePadding::kPaper;
  options.order = MoeOrder::kExpertMajor;
  options.segment_bands = c.segment_bands;
  options.consumers = c.consumers;
  options.poison_workspace = true;
  const MoeModel model = random_model(rng, options);
  const std::uint64_t seed = rng();
  double worst = 0;
  std::mutex mutex;
  run_ranks(kWorldSize, {}, [&](std::shared_ptr<Communicator> communicator) {
    const int rank = communicator->rank();
    std::mt19937_64 own(seed + static_cast<std::uint64_t>(rank));
    const Values x = random_values(own, c.tokens * c.hidden, DType::kFloat16, 1);
    ContextOptions context_options{.num_threads = c.threads, .poison_workspace = true};
    const auto delay = [seed](std::int64_t index) {
      const std::uint64_t mixed = (seed ^ static_cast<std::uint64_t>(index)) * 0x9e3779b97f4a7c15U;
      if ((mixed >> 60U) == 0) std::this_thread::sleep_for(std::chrono::microseconds((mixed >> 32U) % 400));
    };
    context_options.hooks = {.before_tile = delay, .before_transfer = delay};
    Context context(communicator, context_options);
    MoeLayer layer(context, options);
    const MoeRouting routing = make_routing(c.routing, rank, kWorldSize, c.tokens, c.experts, c.top_k, seed);
    Values out(c.tokens * c.hidden, DType::kFloat16);
    out.poison();
    const MoeWeights weights = weights_of(model, layer);
    layer.forward(x.bytes.data(), c.hidden, routing, weights, out.bytes.data(), c.hidden);
    const double error = relative_error(reference_forward(model, routing, x.exact),
                                        [&](std::int64_t i) { return out.get(i); });
    const std::scoped_lock lock(mutex);
    if (!(error <= worst)) worst = error;
  });
  return worst;
}

using MoeConfigurations = SeededTest;

TEST_F(MoeConfigurations, AreWithinThePapersTolerance) {
  const int taken = num_taken();
  double worst = 0;
  for (int i = 0; i < taken; ++i) {
    const int number = taken >= kConfigurations ? i : static_cast<int>(pick(0, kConfigurations - 1));
    const double error = run_configuration(configuration(number), rng_);
    ASSERT_LE(error, kTolerance) << "configuration " << number;
    worst = std::max(worst, error);
  }
  std::printf("%d of %d configurations, largest relative error %.3g (limit %.3g)\n", taken, kConfigurations,
              worst, kTolerance);
}

}  // namespace
}  // namespace flashoverlap::test

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>

#include "flashoverlap/moe_layer.h"
#include "ops/moe_reference.h"
#include "support/matrix.h"
#include "support/ops_call.h"
#include "support/throws.h"

/// Known faults B17, B19 and B29, errors by their message, and ranks that fail.
namespace flashoverlap::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// Expert e multiplies by e + 1: y = W_down relu(x), with W_up = I and W_down = (e + 1) I. For x >= 0.
struct Scaling {
  std::vector<float> up;
  std::vector<float> down;
  Scaling(const MoeLayer& layer, std::int64_t hidden) {
    const std::int64_t size = hidden * hidden;
    up.assign(at(layer.local_experts() * size), 0);
    down = up;
    for (std::int64_t e = 0; e < layer.local_experts(); ++e) {
      for (std::int64_t i = 0; i < hidden; ++i) {
        up[at(e * size + i * hidden + i)] = 1;
        down[at(e * size + i * hidden + i)] = static_cast<float>(layer.first_expert() + e + 1);
      }
    }
  }
  [[nodiscard]] MoeWeights weights() const { return {up.data(), down.data()}; }
};

MoeLayerOptions scaling_options(std::int64_t experts, std::int64_t hidden) {
  MoeLayerOptions options;
  options.hidden = options.intermediate = hidden;
  options.num_experts = experts;
  options.gated = false;
  options.activation = Activation::kRelu;
  options.tile_m = 16;
  options.tile_n = 48;
  options.poison_workspace = true;
  return options;
}

MoeRouting ones(std::int64_t tokens, std::int64_t experts, std::int32_t top_k,
                std::vector<std::int32_t> ids) {
  std::vector<float> weights(ids.size(), 1.0F);
  return {tokens, experts, top_k, std::move(ids), std::move(weights)};
}

/// y of each token, which must be the same in all columns; guards must be whole.
std::vector<float> call(MoeLayer& layer, const Scaling& scaling, const MoeRouting& routing,
                        const std::function<float(std::int64_t)>& x_of_token, MoeReport* report = nullptr) {
  const std::int64_t hidden = layer.options().hidden;
  Matrix x(routing.tokens, hidden, DType::kFloat32, hidden + 3);
  Matrix out(routing.tokens, hidden, DType::kFloat32, hidden + 5);
  x.fill([&](std::int64_t t, std::int64_t) { return x_of_token(t); });
  const MoeReport result = layer.forward(x.data(), x.ld(), routing, scaling.weights(), out.data(), out.ld());
  if (report != nullptr) *report = result;
  EXPECT_TRUE(out.guards_intact());
  std::vector<float> y;
  for (std::int64_t t = 0; t < routing.tokens; ++t) {
    y.push_back(out.at(t, 0));
    for (std::int64_t h = 1; h < hidden; ++h) EXPECT_EQ(out.at(t, h), y.back()) << "token " << t;
  }
  return y;
}

constexpr MoePadding kPaddings[] = {MoePadding::kPaper, MoePadding::kRagged, MoePadding::kShared};

TEST(KnownFaults, B17TheSameExpertTwiceInOneToken) {
  for (const MoePadding padding : kPaddings) {
    on_ranks(3, [&](Context& context, int) {
      MoeLayerOptions options = scaling_options(144, 64);
      options.padding = padding;
      options.order = MoeOrder::kExpertMajor;
      MoeLayer layer(context, options);
      const Scaling scaling(layer, 64);
      const std::vector<std::int32_t> reported = {121, 62, 117, 62, 32, 13};
      const std::vector<std::int32_t> fives(6, 5);
      const std::vector<std::int32_t> ordinary = {0, 143, 50, 49, 48, 1};
      std::vector<std::int32_t> ids;
      for (int i = 0; i < 9; ++i) ids.insert(ids.end(), reported.begin(), reported.end());
      const auto one = [](std::int64_t) { return 1.0F; };
      EXPECT_EQ(call(layer, scaling, ones(9, 144, 6, ids), one), std::vector<float>(9, 413));
      ids.clear();
      for (const auto& row : {fives, ordinary, reported, fives})
        ids.insert(ids.end(), row.begin(), row.end());
      EXPECT_EQ(call(layer, scaling, ones(4, 144, 6, ids), one), std::vector<float>({36, 297, 413, 36}));
    });
  }
}

TEST(KnownFaults, B19ExpertsWithoutTokens) {
  for (const MoePadding padding : kPaddings) {
    on_ranks(4, [&](Context& context, int rank) {
      MoeLayerOptions options = scaling_options(8, 32);
      options.padding = padding;
      options.order = MoeOrder::kExpertMajor;
      MoeLayer layer(context, options);
      const Scaling scaling(layer, 32);
      std::vector<std::int32_t> dirty(16);
      for (std::size_t t = 0; t < 16; ++t) dirty[t] = static_cast<std::int32_t>(t % 8);
      call(layer, scaling, ones(16, 8, 1, dirty), [](std::int64_t) { return 1e4F; });
      const std::int32_t six[] = {0, 1, 3, 4, 6, 7};
      std::vector<std::int32_t> ids(16);
      for (std::size_t t = 0; t < 16; ++t) ids[t] = six[t % 6];
      const auto number = [](std::int64_t t) { return static_cast<float>(t + 1); };
      const std::vector<float> y = call(layer, scaling, ones(16, 8, 1, ids), number);
      EXPECT_EQ(y, std::vector<float>({1, 4, 12, 20, 35, 48, 7, 16, 36, 50, 77, 96, 13, 28, 60, 80}));
      EXPECT_EQ(std::accumulate(y.begin(), y.end(), 0.0F), 583.0F);
      // All tokens on one rank's expert; then no token anywhere; then on one rank only.
      const std::vector<std::int32_t> threes(16, 3);
      EXPECT_EQ(call(layer, scaling, ones(16, 8, 1, threes), [](std::int64_t) { return 1.0F; }),
                std::vector<float>(16, 4));
      EXPECT_TRUE(call(layer, scaling, ones(0, 8, 1, {}), number).empty());
      const std::int64_t tokens = rank == 2 ? 3 : 0;
      EXPECT_EQ(call(layer, scaling, ones(tokens, 8, 1, std::vector<std::int32_t>(at(tokens), 7)), number),
                rank == 2 ? std::vector<float>({8, 16, 24}) : std::vector<float>());
      // Tokens that no expert takes.
      EXPECT_EQ(call(layer, scaling, ones(2, 8, 1, {-1, 4}), number), std::vector<float>({0, 10}));
    });
  }
}

TEST(KnownFaults, B29MoreTokensThanCapacity) {
  for (const std::int64_t capacity :
       {std::int64_t{0}, std::int64_t{64}, std::int64_t{1023}, std::int64_t{1024}}) {
    std::mutex mutex;
    std::int64_t eights = 0;
    std::int64_t zeros = 0;
    std::int64_t dropped = 0;
    on_ranks(4, [&](Context& context, int) {
      MoeLayerOptions options = scaling_options(8, 16);
      options.capacity = capacity;
      MoeLayer layer(context, options);
      MoeReport report;
      const std::vector<float> y = call(
          layer, Scaling(layer, 16), ones(256, 8, 1, std::vector<std::int32_t>(256, 7)),
          [](std::int64_t) { return 1.0F; }, &report);
      const std::scoped_lock lock(mutex);
      eights += std::count(y.begin(), y.end(), 8.0F);
      zeros += std::count(y.begin(), y.end(), 0.0F);
      dropped += report.dropped_rows;
      EXPECT_EQ(report.all_dropped_rows, capacity == 0 ? 0 : 1024 - capacity);
    });
    EXPECT_EQ(eights, capacity == 0 ? 1024 : capacity);
    EXPECT_EQ(zeros, 1024 - eights);
    EXPECT_EQ(dropped, zeros);
  }
}

/// What each rank's `body` throws.
std::vector<std::string> errors_of(int world_size, const InProcessOptions& in_process,
                                   const std::function<void(std::shared_ptr<Communicator>, int)>& body) {
  std::vector<std::string> errors(at(world_size));
  try {
    run_ranks(world_size, in_process, [&](std::shared_ptr<Communicator> communicator) {
      const int rank = communicator->rank();
      try {
        body(communicator, rank);
      } catch (const std::exception& error) {
        errors[at(rank)] = error.what();
        throw;
      }
    });
  } catch (const Error&) {
  }
  return errors;
}

TEST(MoeErrors, OneRanksMistakeIsEveryRanksError) {
  struct Mistake {
    const char* message;
    std::function<void(MoeRouting&)> make;
  };
  const Mistake mistakes[] = {
      {"token 1, slot 0 has expert 8; an expert in [0, 8), or -1 for none, is expected",
       [](MoeRouting& r) { r.experts[1] = 8; }},
      {"token 0, slot 0 has expert -2", [](MoeRouting& r) { r.experts[0] = -2; }},
      {"token 2, slot 0 has weight nan; a finite number is expected",
       [](MoeRouting& r) { r.weights[2] = NAN; }},
      {"routing of 3 tokens with top_k 1 has 2 experts and 3 weights; 3 of each are expected",
       [](MoeRouting& r) { r.experts.pop_back(); }},
      {"the routing is for 9 experts, the layer has 8", [](MoeRouting& r) { r.num_experts = 9; }},
  };
  for (const Mistake& mistake : mistakes) {
    const auto errors = errors_of(3, {}, [&](const std::shared_ptr<Communicator>& communicator, int rank) {
      Context context(communicator, {.num_threads = 1});
      MoeLayer layer(context, scaling_options(8, 16));
      MoeRouting routing = ones(3, 8, 1, {0, 1, 2});
      if (rank == 1) mistake.make(routing);
      call(layer, Scaling(layer, 16), routing, [](std::int64_t) { return 1.0F; });
    });
    for (const std::string& error : errors)
      EXPECT_THAT(error, AllOf(HasSubstr("rank 1: "), HasSubstr(mistake.message)));
  }
}

TEST(MoeErrors, Matrices) {
  on_ranks(2, [](Context& context, int rank) {
    MoeLayer layer(context, scaling_options(8, 16));
    const Scaling scaling(layer, 16);
    const MoeRouting routing = ones(3, 8, 1, {0, 1, 2});
    std::vector<float> x(48, 1);
    std::vector<float> out(48, NAN);
    const auto message = [&](const void* from, std::int64_t ldx, MoeWeights weights, void* to,
                             std::int64_t ldo) {
      if (rank != 0) from = x.data(), ldx = 16, weights = scaling.weights(), to = out.data(), ldo = 16;
      return message_of(ErrorKind::kBadArgument,
                        [&] { layer.forward(from, ldx, routing, weights, to, ldo); });
    };
    const MoeWeights good = scaling.weights();
    EXPECT_THAT(message(nullptr, 16, good, out.data(), 16), HasSubstr("rank 0: x is null"));
    EXPECT_THAT(message(x.data(), 15, good, out.data(), 16),
                HasSubstr("rank 0: ldx is 15; at least 16, the hidden size, is expected"));
    EXPECT_THAT(message(x.data(), 16, {nullptr, good.down}, out.data(), 16),
                HasSubstr("the up weights are null"));
    EXPECT_THAT(message(x.data(), 16, {good.up, nullptr}, out.data(), 16),
                HasSubstr("the down weights are null"));
    EXPECT_THAT(message(x.data(), 16, good, x.data() + 47, 16), HasSubstr("overlaps x"));
    EXPECT_THAT(message(reinterpret_cast<std::byte*>(x.data()) + 1, 16, good, out.data(), 16),
                HasSubstr("is not aligned to its 4 bytes an element"));
    EXPECT_THAT(
        message_of(ErrorKind::kBadArgument,
                   [&] { layer.backward(x.data(), 16, good, {.input = out.data(), .input_ld = 16}); }),
        HasSubstr("backward needs a forward before it"));
    EXPECT_TRUE(std::isnan(out[0])) << "nothing may be written";
    layer.forward(x.data(), 16, routing, good, out.data(), 16);
    EXPECT_EQ(out[0], 1.0F) << "an error before any communication leaves the layer usable";
    EXPECT_THAT(message_of(ErrorKind::kBadArgument, [&] { layer.backward(x.data(), 16, good, {}); }),
                HasSubstr("input_ld is 0"));
  });
}

TEST(MoeErrors, Options) {
  const auto message = [](const std::function<void(MoeLayerOptions&, int)>& change) {
    std::string text;
    on_ranks(2, [&](Context& context, int rank) {
      MoeLayerOptions options = scaling_options(8, 16);
      change(options, rank);
      const std::string mine = message_of(ErrorKind::kBadArgument, [&] { MoeLayer layer(context, options); });
      if (rank == 0) text = mine;
    });
    return text;
  };
  EXPECT_THAT(message([](auto& o, int) { o.hidden = -1; }),
              HasSubstr("hidden is -1; at least 0 is expected"));
  EXPECT_THAT(message([](auto& o, int rank) { o.consumers = rank == 1 ? 0 : 1; }),
              HasSubstr("rank 1: consumers is 0; at least 1 is expected"));
  EXPECT_THAT(message([](auto& o, int) { o.consumers = 17; }), HasSubstr("at most 16 are expected"));
  EXPECT_THAT(message([](auto& o, int rank) { o.capacity = rank; }),
              AllOf(HasSubstr("ranks disagree"), HasSubstr("capacity 0"), HasSubstr("capacity 1")));
  EXPECT_THAT(message([](auto& o, int rank) { o.tile_m = rank == 1 ? 32 : 16; }),
              AllOf(HasSubstr("ranks disagree"), HasSubstr("tile 16x"), HasSubstr("tile 32x")));
  EXPECT_THAT(message([](auto& o, int rank) { o.gated = rank == 0; }),
              AllOf(HasSubstr("f32, gated "), HasSubstr("rank 1 has moe-layer")));
  EXPECT_THAT(message([](auto& o, int) { o.padding = MoePadding::kShared; }),
              HasSubstr("needs order 'expert-major'"));
  EXPECT_THAT(message([](auto& o, int) { o.controller.max_consumers = 0; }),
              HasSubstr("controller: max_consumers is 0; at least 1 is expected"));
}

/// One layer call in which `hook` runs on rank 1 before each tile.
std::vector<std::string> errors_with(const std::function<void()>& hook, MoeTransport transport,
                                     int timeout_ms) {
  InProcessOptions in_process;
  in_process.timeout = std::chrono::milliseconds(timeout_ms);
  return errors_of(3, in_process, [&](const std::shared_ptr<Communicator>& communicator, int rank) {
    ContextOptions options{.num_threads = 1};
    if (rank == 1) options.hooks.before_tile = [&](std::int64_t) { hook(); };
    Context context(communicator, options);
    MoeLayerOptions layer_options = scaling_options(8, 16);
    layer_options.transport = transport;
    MoeLayer layer(context, layer_options);
    std::vector<std::int32_t> ids;
    for (std::int32_t i = 0; i < 64; ++i) ids.push_back(i % 8);
    call(layer, Scaling(layer, 16), ones(64, 8, 1, ids), [](std::int64_t) { return 1.0F; });
  });
}

TEST(MoeFailures, ARankThatThrowsIsEveryRanksError) {
  for (const MoeTransport transport : {MoeTransport::kPut, MoeTransport::kCollective}) {
    const auto errors = errors_with([] { throw std::runtime_error("on purpose"); }, transport, 60'000);
    for (const std::string& error : errors)
      EXPECT_THAT(error, AllOf(HasSubstr("rank 1"), HasSubstr("on purpose")));
  }
}

TEST(MoeFailures, AStalledRankIsATimeOutOfTheOthers) {
  for (const MoeTransport transport : {MoeTransport::kPut, MoeTransport::kCollective}) {
    // Sleeps until the others have given up; what it does after that fails.
    std::atomic<int> failed{0};
    InProcessOptions in_process;
    in_process.timeout = std::chrono::milliseconds(300);
    const auto errors =
        errors_of(3, in_process, [&](const std::shared_ptr<Communicator>& communicator, int rank) {
          ContextOptions options{.num_threads = 1};
          if (rank == 1) {
            options.hooks.before_tile = [&](std::int64_t) {
              while (failed < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            };
          }
          Context context(communicator, options);
          MoeLayerOptions layer_options = scaling_options(8, 16);
          layer_options.transport = transport;
          MoeLayer layer(context, layer_options);
          std::vector<std::int32_t> ids;
          for (std::int32_t i = 0; i < 64; ++i) ids.push_back(i % 8);
          try {
            call(layer, Scaling(layer, 16), ones(64, 8, 1, ids), [](std::int64_t) { return 1.0F; });
          } catch (...) {
            ++failed;
            throw;
          }
        });
    for (const std::string& error : errors)
      EXPECT_THAT(error, AllOf(HasSubstr("time-out"), HasSubstr("rank 1")));
  }
}

TEST(MoeFailures, ARankThatLeavesIsNamed) {
  const auto errors = errors_of(2, {}, [](const std::shared_ptr<Communicator>& communicator, int rank) {
    Context context(communicator, {.num_threads = 1});
    MoeLayer layer(context, scaling_options(8, 16));
    if (rank == 1) return;
    call(layer, Scaling(layer, 16), ones(1, 8, 1, {7}), [](std::int64_t) { return 1.0F; });
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 1 did not arrive"), HasSubstr("it has finished")));
  EXPECT_EQ(errors[1], "");
}

}  // namespace
}  // namespace flashoverlap::test

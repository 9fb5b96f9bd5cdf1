// The backward of the layer of experts on GPUs against float64, within what roundings may cost.
#include <algorithm>
#include <cmath>
#include <random>

#include "gpu_matrix.h"
#include "gpu_ranks.h"
#include "gpu_test.h"
#include "moe_case.h"
#include "ops/moe_rounding.h"

namespace flashoverlap::gpu_test {
namespace {

test::Values gradients_by_output(const MoeCase& call, int rank) {
  std::mt19937_64 rng(call.seed * 1000 + 500 + static_cast<std::uint64_t>(rank));
  return test::random_values(rng, call.routings[index(rank)].tokens * call.options.hidden, call.options.dtype,
                             1.0F);
}

/// What must come of a case: of all ranks, to whose weights all tokens add.
class Expected {
 public:
  explicit Expected(const MoeCase& call) : model_(model_of(call)) {
    for (int rank = 0; rank < std::ssize(call.routings); ++rank) {
      const MoeRouting& routing = call.routings[index(rank)];
      const test::Values x = tokens_of(call, rank);
      const test::Values by_out = gradients_by_output(call, rank);
      test::reference_backward(model_, routing, x.exact, by_out.exact, exact_);
      test::gradient_variances(model_, routing, x.exact, by_out.exact, exact_.input, variance_);
      tokens_.push_back({{exact_.input, variance_.input}, {exact_.weights, variance_.weights}});
    }
  }

  struct Gradient {
    test::Doubles exact, variance;
  };
  [[nodiscard]] const Gradient& input(int rank) const { return tokens_[index(rank)].input; }
  [[nodiscard]] const Gradient& routing_weights(int rank) const { return tokens_[index(rank)].weights; }
  /// Of the experts from `first` on.
  [[nodiscard]] Gradient up(std::int64_t first, std::int64_t experts) const {
    return part(exact_.up, variance_.up, first, experts);
  }
  [[nodiscard]] Gradient down(std::int64_t first, std::int64_t experts) const {
    return part(exact_.down, variance_.down, first, experts);
  }

 private:
  struct OfTokens {
    Gradient input, weights;
  };

  [[nodiscard]] Gradient part(const test::Doubles& exact, const test::Doubles& variance, std::int64_t first,
                              std::int64_t experts) const {
    const std::int64_t one = std::ssize(exact) / model_.experts;
    const auto of = [&](const test::Doubles& all) {
      return test::Doubles(all.begin() + first * one, all.begin() + (first + experts) * one);
    };
    return {of(exact), of(variance)};
  }

  test::MoeModel model_;
  test::ReferenceGradients exact_, variance_;
  std::vector<OfTokens> tokens_;
};

/// One rank's gradients, read.
struct Gradients {
  std::vector<float> input, routing_weights, up, down;
};

/// One rank's gradients on its device, poisoned.
struct GradientMatrices {
  GradientMatrices(const MoeCase& call, const MoeLayer& layer, int rank)
      : GradientMatrices(call.options, layer.local_experts(), call.routings[index(rank)]) {}

  [[nodiscard]] MoeGradients wanted() const {
    return {.input = input.data(),
            .input_ld = input.ld(),
            .routing_weights = static_cast<float*>(routing_weights.data()),
            .up = static_cast<float*>(up.data()),
            .down = static_cast<float*>(down.data())};
  }
  [[nodiscard]] Gradients read() const {
    return {input.read(), routing_weights.read(), up.read(), down.read()};
  }

  DeviceMatrix input, routing_weights, up, down;

 private:
  GradientMatrices(const MoeLayerOptions& options, std::int64_t experts, const MoeRouting& routing)
      : input(routing.tokens, options.hidden, options.hidden + 8, options.dtype),
        routing_weights(routing.tokens, routing.top_k, routing.top_k, DType::kFloat32),
        up(experts * (options.gated ? 2 : 1) * options.intermediate, options.hidden, options.hidden,
           DType::kFloat32),
        down(experts * options.hidden, options.intermediate, options.intermediate, DType::kFloat32) {}
};

/// One rank's layer with its matrices.
class BackwardCall {
 public:
  BackwardCall(Rank& rank, const MoeCase& call)
      : rank_(rank), call_(call), layer_(*rank.context, call.options), rows_(matrices_of(call)) {}

  void forward(Method method) {
    (void)layer_.forward(rows_.x.data(), rows_.x.ld(), routing(), weights(), rows_.out.data(), rows_.out.ld(),
                         method, nullptr, rank_.native_stream());
  }
  [[nodiscard]] GradientMatrices make_gradients() const { return {call_, layer_, rank_.rank}; }
  void backward(const GradientMatrices& gradients, Method method) {
    (void)layer_.backward(rows_.by_out.data(), rows_.by_out.ld(), weights(), gradients.wanted(), method);
  }
  Gradients backward(Method method) {
    const GradientMatrices gradients = make_gradients();
    backward(gradients, method);
    rank_.stream->synchronize();
    return gradients.read();
  }

  void check(const Gradients& got, const Expected& expected, const char* when) const {
    const std::int64_t first = layer_.first_expert();
    const std::int64_t experts = layer_.local_experts();
    check("input", got.input, expected.input(rank_.rank), when);
    check("routing weights", got.routing_weights, expected.routing_weights(rank_.rank), when);
    check("up", got.up, expected.up(first, experts), when);
    check("down", got.down, expected.down(first, experts), when);
  }

 private:
  struct Matrices {
    DeviceMatrix x, out, by_out, up, down;
  };

  [[nodiscard]] const MoeRouting& routing() const { return call_.routings[index(rank_.rank)]; }
  [[nodiscard]] MoeWeights weights() const { return {.up = rows_.up.data(), .down = rows_.down.data()}; }

  [[nodiscard]] Matrices matrices_of(const MoeCase& call) const {
    const MoeLayerOptions& o = call.options;
    const test::MoeModel model = model_of(call);
    const std::int64_t tokens = routing().tokens;
    return {.x = on_device(tokens_of(call, rank_.rank), 0, tokens, o.hidden, 8),
            .out = {tokens, o.hidden, o.hidden + 8, o.dtype},
            .by_out = on_device(gradients_by_output(call, rank_.rank), 0, tokens, o.hidden, 16),
            .up = on_device(model.up, layer_.first_expert() * model.middle() * o.hidden,
                            layer_.local_experts() * model.middle(), o.hidden),
            .down = on_device(model.down, layer_.first_expert() * o.hidden * o.intermediate,
                              layer_.local_experts() * o.hidden, o.intermediate)};
  }

  // Six standard deviations of what roundings to 16 bits make of the element (moe_rounding.h); products and
  // sums in float32 err by less than the last bits of that.
  void check(const char* what, const std::vector<float>& got, const Expected::Gradient& expected,
             const char* when) const {
    GPU_EXPECT(got.size() == expected.exact.size(), what << ": " << call_.text());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double error = std::abs(static_cast<double>(got[i]) - expected.exact[i]);
      const double bound = 6 * std::sqrt(expected.variance[i]);
      GPU_EXPECT(error <= bound, "gradient of " << what << ", " << when << ", rank " << rank_.rank
                                                << ", element " << i << " is " << got[i] << ", expected "
                                                << expected.exact[i] << " to " << bound << ": "
                                                << call_.text());
    }
  }

  Rank& rank_;
  const MoeCase& call_;
  MoeLayer layer_;
  Matrices rows_;
};

/// Of one forward: gradients of weights have the same bits, as they depend on no return; the input's are
/// close.
void check_both_ways(Rank& rank, const MoeCase& call, const Expected& expected) {
  BackwardCall own(rank, call);
  for (const Method forward : {Method::kOverlap, Method::kSerial}) {
    own.forward(forward);
    const Gradients overlapped = own.backward(Method::kOverlap);
    own.check(overlapped, expected, "overlapped");
    for (const Method method : {Method::kSerial, Method::kOverlap}) {
      const Gradients again = own.backward(method);
      own.check(again, expected, method == Method::kSerial ? "serial" : "overlapped again");
      GPU_EXPECT(again.routing_weights == overlapped.routing_weights, call.text());
      GPU_EXPECT(again.up == overlapped.up, call.text());
      GPU_EXPECT(again.down == overlapped.down, call.text());
    }
  }
}

MoeCase random_backward_case(std::mt19937_64& rng, int world) {
  MoeCase call = random_case(rng, world, 100);
  call.options.activation = static_cast<Activation>(rng() % 4);
  return call;
}

}  // namespace

GPU_TEST(moe_backward_random) {
  for (const int world : world_sizes()) {
    std::mt19937_64 rng(seed() + 100 + static_cast<std::uint64_t>(world));
    for (int i = 0; i < cases(6); ++i) {
      const MoeCase call = random_backward_case(rng, world);
      const Expected expected(call);
      for (const CommunicatorKind kind : kinds_for(world))
        shared_group(world, kind).run([&](Rank& rank) { check_both_ways(rank, call, expected); });
      const MoeCase by_puts = with_puts(call, rng);
      shared_group(world, CommunicatorKind::kLocal).run([&](Rank& rank) {
        check_both_ways(rank, by_puts, expected);
      });
    }
  }
}

// With the same kernels both ways, so that the return's results have the same bits, too.
GPU_TEST(moe_backward_serial_bits) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  const int world = world_sizes().front();
  std::mt19937_64 rng(seed());
  for (const CommunicatorKind kind : kinds_for(world)) {
    GroupOptions options;
    options.world_size = world;
    options.kind = kind;
    options.serial_by_cublas = false;
    Group group(options);
    for (int i = 0; i < cases(4); ++i) {
      const MoeCase call = random_backward_case(rng, world);
      group.run([&](Rank& rank) {
        BackwardCall own(rank, call);
        own.forward(Method::kOverlap);
        const Gradients overlapped = own.backward(Method::kOverlap);
        own.forward(Method::kSerial);
        const Gradients serial = own.backward(Method::kSerial);
        GPU_EXPECT(serial.input == overlapped.input, call.text());
        GPU_EXPECT(serial.routing_weights == overlapped.routing_weights, call.text());
        GPU_EXPECT(serial.up == overlapped.up, call.text());
        GPU_EXPECT(serial.down == overlapped.down, call.text());
      });
    }
  }
}

// Nothing is waited for in between: tables, plans and buffers change while the device works with them.
GPU_TEST(moe_backward_calls_in_a_row) {
  const int world = world_sizes().front();
  std::vector<MoeCase> calls;
  std::vector<Expected> expected;
  for (std::uint64_t i = 0; i < 4; ++i) {
    MoeCase call = small_case(world);
    for (std::int32_t rank = 0; rank < world; ++rank) {
      call.routings[index(rank)] = make_routing(RoutingKind::kModerate, rank, world, 50, 4, 2, 10 + i);
    }
    calls.push_back(call);
    expected.emplace_back(call);
  }
  for (const CommunicatorKind kind : kinds_for(world)) {
    shared_group(world, kind).run([&](Rank& rank) {
      MoeCase call = calls.front();
      BackwardCall own(rank, call);
      std::vector<GradientMatrices> gradients;
      for (std::size_t i = 0; i < calls.size(); ++i) gradients.push_back(own.make_gradients());
      for (int round = 0; round < 3; ++round) {
        for (std::size_t i = 0; i < calls.size(); ++i) {
          call.routings = calls[i].routings;
          own.forward(Method::kOverlap);
          for (int times = 0; times < 2; ++times) own.backward(gradients[i], Method::kOverlap);
        }
      }
      rank.stream->synchronize();
      for (std::size_t i = 0; i < calls.size(); ++i) own.check(gradients[i].read(), expected[i], "in a row");
    });
  }
}

GPU_TEST(moe_backward_one_rank) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  std::mt19937_64 rng(seed());
  for (int i = 0; i < cases(8); ++i) {
    MoeCase call = random_backward_case(rng, 1);
    call.options.transport = i % 2 == 0 ? MoeTransport::kPut : MoeTransport::kCollective;
    call.options.padding = i % 4 == 0 ? MoePadding::kPaper : MoePadding::kRagged;
    const Expected expected(call);
    shared_group(1, CommunicatorKind::kLocal).run([&](Rank& rank) {
      BackwardCall own(rank, call);
      own.forward(Method::kOverlap);
      own.check(own.backward(Method::kOverlap), expected, "overlapped");
    });
  }
}

// No column is aligned to more than an element.
GPU_TEST(moe_backward_odd_sizes) {
  const int world = world_sizes().front();
  MoeCase call = small_case(world);
  call.options.hidden = 37;
  call.options.intermediate = 19;
  call.options.tile_m = call.options.tile_n = 128;  // tiles that kernels for such operands have
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    call.options.dtype = dtype;
    const Expected expected(call);
    for (const CommunicatorKind kind : kinds_for(world))
      shared_group(world, kind).run([&](Rank& rank) { check_both_ways(rank, call, expected); });
  }
}

GPU_TEST(moe_backward_refuses_what_cannot_run) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  const MoeCase call = small_case(1);
  shared_group(1, CommunicatorKind::kLocal).run([&](Rank& rank) {
    MoeLayer layer(*rank.context, call.options);
    const DeviceMatrix x = on_device(tokens_of(call, 0), 0, 50, 64);
    const DeviceMatrix out(50, 64, 64, DType::kBFloat16);
    const DeviceMatrix up(4 * 64, 64, 64, DType::kBFloat16);
    const DeviceMatrix down(4 * 64, 32, 32, DType::kBFloat16);
    const MoeWeights weights{.up = up.data(), .down = down.data()};
    MoeGradients gradients{.input = out.data(), .input_ld = 64};
    GPU_EXPECT_ERROR((void)layer.backward(x.data(), 64, weights, gradients), "needs a forward before it");
    (void)layer.forward(x.data(), 64, call.routings.front(), weights, out.data(), 64, Method::kOverlap,
                        nullptr, rank.native_stream());
    std::vector<float> host(4 * 64 * 64);
    gradients.up = host.data();
    GPU_EXPECT_ERROR((void)layer.backward(x.data(), 64, weights, gradients), "gradient of the up weights at",
                     "host memory");
    GPU_EXPECT_ERROR((void)layer.backward(host.data(), 64, weights, gradients), "out_gradient at",
                     "host memory");
    GPU_EXPECT_ERROR((void)layer.measure_backward_parts(), "needs a backward before it");
    rank.stream->synchronize();
  });
}

}  // namespace flashoverlap::gpu_test

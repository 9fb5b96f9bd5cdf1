// The backward pass of the MoE layer: gradients of the weights are computed while rows travel. (That they are
// right, too: moe_layer_test.cpp.)
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "flashoverlap/moe_layer.h"
#include "ops/moe_reference.h"
#include "support/ops_call.h"
#include "support/seed.h"
#include "support/throws.h"
#include "support/wait_until.h"

namespace flashoverlap::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// One rank's layer with its matrices; all ranks have the same tokens, routing kinds and weights.
class RankOfLayer {
 public:
  RankOfLayer(Context& context, const MoeLayerOptions& options, std::int64_t tokens, std::uint64_t seed)
      : layer(context, options),
        routing_(make_routing(RoutingKind::kBalanced, context.communicator().rank(),
                              context.communicator().size(), tokens, options.num_experts, 2, seed)) {
    std::mt19937_64 rng(seed);
    const std::int64_t size = tokens * options.hidden;
    model_ = random_model(rng, options);
    x_ = random_values(rng, size, options.dtype, 1);
    by_out_ = random_values(rng, size, options.dtype, 1);
    out_ = Values(size, options.dtype);
    input = Values(size, options.dtype);
    up.resize(at(layer.local_experts() * model_.middle() * options.hidden));
    down.resize(at(layer.local_experts() * options.hidden * options.intermediate));
    by_routing.resize(at(tokens * 2));
  }

  void forward(Method method = Method::kOverlap) {
    const std::int64_t h = layer.options().hidden;
    layer.forward(x_.bytes.data(), h, routing_, weights(), out_.bytes.data(), h, method);
  }

  MoeReport backward(Method method = Method::kOverlap) {
    const std::int64_t h = layer.options().hidden;
    input.poison();
    for (std::vector<float>* gradient : {&up, &down, &by_routing}) std::ranges::fill(*gradient, NAN);
    return layer.backward(by_out_.bytes.data(), h, weights(),
                          {input.bytes.data(), h, by_routing.data(), up.data(), down.data()}, method);
  }

  [[nodiscard]] MoeWeights weights() const { return weights_of(model_, layer); }

  MoeLayer layer;
  Values input;
  std::vector<float> up;
  std::vector<float> down;
  std::vector<float> by_routing;

 private:
  MoeRouting routing_;
  MoeModel model_;
  Values x_;
  Values by_out_;
  Values out_;
};

class MoeBackward : public SeededTest {};

TEST_F(MoeBackward, GivesTheBitsOfTheSerialOne) {
  for (int round = 0; round < 8; ++round) {
    MoeLayerOptions options;
    options.hidden = pick(1, 150);  // more and fewer columns and rows than a step has
    options.intermediate = pick(1, 80);
    options.num_experts = pick(2, 6);
    options.dtype = static_cast<DType>(pick(0, 2));
    options.tile_m = pick(4, 40);
    options.tile_n = pick(4, 60);
    options.poison_workspace = true;
    const int world_size = static_cast<int>(pick(1, 4));
    const std::int64_t tokens = pick(0, 150);
    const std::uint64_t seed = rng_();
    SCOPED_TRACE(fmt::format("W={} H={} I={} E={} tokens {}", world_size, options.hidden,
                             options.intermediate, options.num_experts, tokens));
    on_ranks(world_size,
             [&](Context& context, int rank) {
               RankOfLayer serial(context, options, tokens, seed);
               serial.forward(Method::kSerial);
               const MoeReport alone = serial.backward(Method::kSerial);
               EXPECT_EQ(alone.dispatch_work_us + alone.combine_work_us, 0);
               RankOfLayer overlapped(context, options, tokens, seed);
               overlapped.forward();
               for (int call = 0; call < 2; ++call) {
                 overlapped.backward();
                 EXPECT_EQ(overlapped.input.bytes, serial.input.bytes) << "rank " << rank;
                 EXPECT_EQ(overlapped.up, serial.up) << "rank " << rank;
                 EXPECT_EQ(overlapped.down, serial.down) << "rank " << rank;
                 EXPECT_EQ(overlapped.by_routing, serial.by_routing) << "rank " << rank;
               }
             },
             {.num_threads = static_cast<int>(pick(1, 3))});
    if (HasFailure()) return;
  }
}

MoeLayerOptions small_layer(MoeTransport transport) {
  MoeLayerOptions options;
  options.hidden = options.intermediate = 16;
  options.num_experts = 4;
  options.tile_m = options.tile_n = 64;  // one tile for each owner and expert
  options.transport = transport;
  options.poison_workspace = true;
  return options;
}

/// In backward, rank 1's rows are held back until rank 0 has tried to do more than it can without them, and
/// rank 1's results until rank 0 has had time for other work after its last tile.
class HeldBack {
 public:
  /// `dispatch_transfers`: of rank 1; a put, or a send and a receive.
  explicit HeldBack(int dispatch_transfers) : dispatch_transfers_(dispatch_transfers) {}

  ExecutorHooks hooks_of(int rank) {
    ExecutorHooks hooks;
    if (rank == 0) {
      hooks.before_tile = [this](std::int64_t) { tiles_ += in_backward ? 1 : 0; };
      hooks.before_other_work = [this] {
        ++asked_;
        if (tiles_ == kTiles) ++asked_at_end_;
      };
    } else {
      hooks.before_transfer = [this](std::int64_t) {
        if (!in_backward) return;
        if (transfers_++ < dispatch_transfers_) {
          wait_until([&] { return asked_ > kStepsWithoutRows; });
        } else {
          wait_until([&] { return asked_at_end_ > 0; });
        }
      };
    }
    return hooks;
  }

  std::atomic<bool> in_backward{false};

 private:
  // Two experts with rows of two owners, in both GEMMs.
  static constexpr int kTiles = 2 * 2 * 2;
  // One to transpose, one for the routing's weights, and the own rows of two experts.
  static constexpr int kStepsWithoutRows = 1 + 1 + 2;

  const int dispatch_transfers_;
  std::atomic<int> tiles_{0};
  std::atomic<int> asked_{0};
  std::atomic<int> asked_at_end_{0};
  std::atomic<int> transfers_{0};
};

TEST(MoeBackwardWhile, RowsTravelItComputesGradientsOfWeights) {
  for (const MoeTransport transport : {MoeTransport::kPut, MoeTransport::kCollective}) {
    HeldBack held(transport == MoeTransport::kPut ? 1 : 2);
    run_ranks(2, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      const int rank = communicator->rank();
      Context context(communicator, {.num_threads = 1, .hooks = held.hooks_of(rank)});
      RankOfLayer serial(context, small_layer(transport), 40, 5);
      serial.forward(Method::kSerial);
      serial.backward(Method::kSerial);
      RankOfLayer overlapped(context, small_layer(transport), 40, 5);
      overlapped.forward();
      communicator->exchange(std::uint64_t{0}, {.operation = "both forwards are done"});
      held.in_backward = true;
      const MoeReport report = overlapped.backward();
      if (rank == 0) {
        EXPECT_GT(report.dispatch_work_us, 0);
        EXPECT_GT(report.combine_work_us, 0);
      }
      EXPECT_EQ(overlapped.up, serial.up);
      EXPECT_EQ(overlapped.down, serial.down);
      EXPECT_EQ(overlapped.by_routing, serial.by_routing);
    });
  }
}

/// What each rank says when rank 1 throws `where` it does other work; rank 0 sends nothing before.
TEST(MoeBackwardFailures, AThrowingStepIsAnErrorOnEveryRank) {
  std::atomic<bool> in_backward{false};
  std::atomic<bool> thrown{false};
  std::vector<std::string> errors(3);
  try {
    run_ranks(3, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      const int rank = communicator->rank();
      ContextOptions options{.num_threads = 1};
      if (rank == 1) {
        options.hooks.before_other_work = [&] {
          thrown = true;
          throw std::runtime_error("on purpose");
        };
      } else {
        options.hooks.before_transfer = [&](std::int64_t) {
          if (in_backward) wait_until([&] { return thrown.load(); });
        };
      }
      Context context(communicator, options);
      RankOfLayer layer(context, small_layer(MoeTransport::kPut), 40, 5);
      layer.forward();
      communicator->exchange(std::uint64_t{0}, {.operation = "all forwards are done"});
      in_backward = true;
      try {
        layer.backward();
      } catch (const Error& error) {
        errors[at(rank)] = error.what();
        throw;
      }
    });
  } catch (const Error&) {
  }
  for (const std::string& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("rank 1"), HasSubstr("other work: on purpose")));
  }
}

TEST(MoeBackwardParts, NeedABackwardOfTheLastForward) {
  on_ranks(2, [](Context& context, int) {
    RankOfLayer rank(context, small_layer(MoeTransport::kPut), 40, 5);
    const auto message = [&] {
      return message_of(ErrorKind::kBadArgument, [&] { rank.layer.measure_backward_parts(); });
    };
    EXPECT_THAT(message(), HasSubstr("measure_backward_parts needs a backward before it"));
    rank.forward();
    EXPECT_THAT(message(), HasSubstr("measure_backward_parts needs a backward before it"));
    rank.backward();
    const MoeLayer::Parts parts = rank.layer.measure_backward_parts();
    for (const double us : {parts.dispatch_gemm_us, parts.dispatch_transfer_us, parts.combine_gemm_us,
                            parts.combine_transfer_us}) {
      EXPECT_GT(us, 0);
    }
    EXPECT_THAT(message(), HasSubstr("measure_backward_parts needs a backward before it"));
    const Values input = rank.input;
    rank.backward();
    EXPECT_EQ(rank.input.bytes, input.bytes) << "the forward's buffers are not whole";
    rank.forward();
    EXPECT_THAT(message(), HasSubstr("measure_backward_parts needs a backward before it"));
  });
}

}  // namespace
}  // namespace flashoverlap::test

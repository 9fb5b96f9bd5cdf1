// The layer whose rows lie on a device, with a device of host memory: what a GPU does is tested in tests/gpu.
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "flashoverlap/cpu_executor.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/machine_profile.h"
#include "flashoverlap/moe_layer.h"
#include "host_moe_device.h"
#include "ops/moe_reference.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap::test {
namespace {

/// One rank whose rows lie on a device.
struct DeviceRank {
  std::shared_ptr<HostDevice> device = std::make_shared<HostDevice>();
  Context context;
  explicit DeviceRank(const std::shared_ptr<Communicator>& communicator, std::int64_t units = 32)
      : context(communicator,
                std::make_unique<DeviceExecutor>(
                    make_cpu_executor(communicator, {.num_threads = 2, .poison_workspace = true}), device)) {
    device->units = units;
  }
};

class MoeOnDevice : public SeededTest {
 protected:
  MoeLayerOptions random_options() {
    MoeLayerOptions options;
    options.num_experts = pick(1, 7);
    options.hidden = pick(1, 40);
    options.intermediate = pick(1, 24);
    options.gated = pick(0, 1) == 0;
    options.activation = static_cast<Activation>(pick(0, 3));
    options.dtype = pick(0, 1) == 0 ? DType::kBFloat16 : DType::kFloat16;
    options.tile_m = pick(1, 9);
    options.tile_n = pick(1, 20);
    options.transport = pick(0, 1) == 0 ? MoeTransport::kPut : MoeTransport::kCollective;
    options.consumers = pick(1, 6);
    options.segment_bands = pick(1, 3);
    options.collective_groups = pick(1, 4);
    options.poison_workspace = true;
    return options;
  }
  MoeRouting random_routing(const MoeLayerOptions& options, int rank, int world, std::int32_t top_k) {
    const std::int64_t tokens = pick(0, 4) == 0 ? 0 : pick(1, 25);
    MoeRouting routing = make_routing(static_cast<RoutingKind>(pick(0, 2)), rank, world, tokens,
                                      options.num_experts, top_k, 7);
    for (std::int32_t& expert : routing.experts) {
      if (pick(0, 5) == 0) expert = -1;
    }
    return routing;
  }
};

// The plans are the same and so are the passes, so the bits are.
TEST_F(MoeOnDevice, GivesTheBitsOfTheHost) {
  for (int round = 0; round < 40; ++round) {
    const int world = static_cast<int>(pick(1, 5));
    const MoeLayerOptions options = random_options();
    const MoeModel model = random_model(rng_, options);
    const auto top_k = static_cast<std::int32_t>(pick(1, std::min<std::int64_t>(3, options.num_experts)));
    std::vector<MoeRouting> routings;
    std::vector<Values> inputs;
    for (int r = 0; r < world; ++r) {
      routings.push_back(random_routing(options, r, world, top_k));
      inputs.push_back(random_values(rng_, routings.back().tokens * options.hidden, options.dtype, 1));
    }
    run_ranks(world, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      const auto rank = static_cast<std::size_t>(communicator->rank());
      const std::int64_t h = options.hidden;
      Values expected(routings[rank].tokens * h, options.dtype);
      {
        Context context(communicator, {.num_threads = 2, .poison_workspace = true});
        MoeLayer layer(context, options);
        layer.forward(inputs[rank].bytes.data(), h, routings[rank], weights_of(model, layer),
                      expected.bytes.data(), h);
      }
      DeviceRank on(communicator);
      MoeLayer layer(on.context, options);
      int stream = 0;
      for (const Method method : {Method::kOverlap, Method::kSerial, Method::kOverlap}) {
        Values out(routings[rank].tokens * h, options.dtype);
        out.poison();
        on.device->calls.clear();
        const MoeReport report =
            layer.forward(inputs[rank].bytes.data(), h, routings[rank], weights_of(model, layer),
                          out.bytes.data(), h, method, nullptr, &stream);
        EXPECT_EQ(out.bytes, expected.bytes) << "rank " << rank << " of " << world;
        EXPECT_EQ(report.workspace_bytes, on.device->reserved_bytes());
        EXPECT_EQ(fmt::format("{}", fmt::join(on.device->calls, " ")),
                  "poison gather moe-dispatch activate moe-combine reduce end");
      }
      EXPECT_EQ(on.device->streams, std::set<void*>{&stream}) << "all in the caller's stream";
    });
    if (HasFailure()) return;
  }
}

/// One rank's gradients, poisoned.
struct Gradients {
  Values input;
  std::vector<float> routing_weights, up, down;

  Gradients(const MoeModel& model, const MoeLayer& layer, const MoeRouting& routing)
      : input(routing.tokens * model.hidden, model.up.dtype),
        routing_weights(at(routing.tokens * routing.top_k), NAN),
        up(at(layer.local_experts() * model.middle() * model.hidden), NAN),
        down(at(layer.local_experts() * model.hidden * model.intermediate), NAN) {
    input.poison();
    // Null would say that they are not wanted, which empty ones are.
    for (std::vector<float>* gradient : {&routing_weights, &up, &down}) gradient->reserve(1);
  }
  [[nodiscard]] MoeGradients wanted(std::int64_t hidden) {
    return {input.bytes.data(), hidden, routing_weights.data(), up.data(), down.data()};
  }
};

/// Both added the same products, in another order.
void expect_same_sums(const std::vector<float>& got, const std::vector<float>& expected) {
  const Doubles exact(expected.begin(), expected.end());
  EXPECT_LT(relative_error(exact, [&](std::int64_t i) { return got[at(i)]; }), 1e-5);
}

// Passes and plans as above; only the products over rows are added up in another order.
TEST_F(MoeOnDevice, BackwardGivesTheGradientsOfTheHost) {
  const std::string overlapped =
      "poison transpose gather fork transpose* moe-dispatch join activate_backward fork moe-combine reduce "
      "weight_gradient* order* multiply* order* multiply* join end";
  const std::string serial =
      "poison transpose gather transpose moe-dispatch activate_backward moe-combine reduce weight_gradient "
      "order multiply order multiply end";
  for (int round = 0; round < 40; ++round) {
    const int world = static_cast<int>(pick(1, 5));
    MoeLayerOptions options = random_options();
    if (pick(0, 3) == 0) options.capacity = pick(1, 20);
    const MoeModel model = random_model(rng_, options);
    const auto top_k = static_cast<std::int32_t>(pick(1, std::min<std::int64_t>(3, options.num_experts)));
    std::vector<MoeRouting> routings;
    std::vector<Values> inputs, by_outs;
    for (int r = 0; r < world; ++r) {
      routings.push_back(random_routing(options, r, world, top_k));
      inputs.push_back(random_values(rng_, routings.back().tokens * options.hidden, options.dtype, 1));
      by_outs.push_back(random_values(rng_, routings.back().tokens * options.hidden, options.dtype, 1));
    }
    run_ranks(world, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      const auto rank = static_cast<std::size_t>(communicator->rank());
      const std::int64_t h = options.hidden;
      int stream = 0;
      const auto forward = [&](MoeLayer& layer, Method method) {
        Values out(routings[rank].tokens * h, options.dtype);
        layer.forward(inputs[rank].bytes.data(), h, routings[rank], weights_of(model, layer),
                      out.bytes.data(), h, method, nullptr, &stream);
      };
      const auto backward = [&](MoeLayer& layer, Method method) {
        Gradients gradients(model, layer, routings[rank]);
        layer.backward(by_outs[rank].bytes.data(), h, weights_of(model, layer), gradients.wanted(h), method);
        return gradients;
      };
      Context context(communicator, {.num_threads = 2, .poison_workspace = true});
      MoeLayer on_host(context, options);
      forward(on_host, Method::kOverlap);
      const Gradients expected = backward(on_host, Method::kOverlap);
      DeviceRank on(communicator);
      MoeLayer layer(on.context, options);
      forward(layer, Method::kOverlap);
      std::optional<Gradients> first;
      for (const Method method : {Method::kOverlap, Method::kSerial, Method::kOverlap}) {
        on.device->calls.clear();
        const Gradients got = backward(layer, method);
        EXPECT_EQ(got.input.bytes, expected.input.bytes) << "rank " << rank << " of " << world;
        EXPECT_EQ(got.routing_weights, expected.routing_weights) << "rank " << rank << " of " << world;
        expect_same_sums(got.up, expected.up);
        expect_same_sums(got.down, expected.down);
        if (!first) first = got;
        EXPECT_EQ(got.up, first->up);
        EXPECT_EQ(got.down, first->down);
        EXPECT_EQ(fmt::format("{}", fmt::join(on.device->calls, " ")),
                  method == Method::kSerial ? serial : overlapped);
      }
      EXPECT_EQ(on.device->streams, std::set<void*>{&stream}) << "all else in the forward's stream";
    });
    if (HasFailure()) return;
  }
}

/// A layer on devices, called again and again with one routing.
class RepeatedCalls {
 public:
  RepeatedCalls(const std::shared_ptr<Communicator>& communicator, const MoeLayerOptions& options,
                std::int64_t units = 32)
      : on_(communicator, units),
        layer_(on_.context, options),
        routing_(make_routing(RoutingKind::kModerate, communicator->rank(), communicator->size(), 20,
                              options.num_experts, 2, 1)),
        x_(at(20 * options.hidden)),
        out_(at(20 * options.hidden)),
        up_(at(layer_.local_experts() * 2 * options.intermediate * options.hidden)),
        down_(at(layer_.local_experts() * options.intermediate * options.hidden)) {}

  [[nodiscard]] HostDevice& device() { return *on_.device; }
  [[nodiscard]] MoeLayer& layer() { return layer_; }
  [[nodiscard]] MoeWeights weights() const { return {up_.data(), down_.data()}; }
  MoeReport call(Timeline* timeline = nullptr) {
    const std::int64_t h = layer_.options().hidden;
    return layer_.forward(x_.data(), h, routing_, weights(), out_.data(), h, Method::kOverlap, timeline);
  }

  static MoeLayerOptions options() {
    MoeLayerOptions options;
    options.hidden = options.intermediate = 8;
    options.num_experts = 4;
    options.dtype = DType::kBFloat16;
    return options;
  }

 private:
  DeviceRank on_;
  MoeLayer layer_;
  MoeRouting routing_;
  std::vector<std::uint16_t> x_, out_, up_, down_;
};

// Consumers take units from the producer; what one rank tells moves all. Calls end late, as on a GPU whose
// host runs ahead.
TEST_F(MoeOnDevice, ConsumersAdapt) {
  for (const std::int64_t lag : {0, 1, 3}) {
    run_ranks(3, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      MoeLayerOptions options = RepeatedCalls::options();
      options.adapt = true;
      options.controller.max_consumers = 16;
      options.controller.consumer_step = 3;
      RepeatedCalls repeated(communicator, options);
      const double share = communicator->rank() == 1 ? 1 : 0.1;  // of what is to be sent
      repeated.device().lag = lag;
      repeated.device().machine = [&](const Resources& units) {
        EXPECT_EQ(units.compute_units + units.communication_units, 32);
        const double send_us = share * 1000 / static_cast<double>(units.communication_units);
        const double compute_us = 3200 / static_cast<double>(units.compute_units);
        return plan::MoeDevice::PutTimes{.producer_us = compute_us,
                                         .backlog_us = std::max(0.0, send_us - compute_us),
                                         .idle_us = std::max(0.0, compute_us - send_us)};
      };
      MoeReport report;
      for (int i = 0; i < 60; ++i) report = repeated.call();
      EXPECT_TRUE(repeated.device().times_puts);
      EXPECT_NEAR(static_cast<double>(report.setting.consumers), 8, 2) << "rank " << communicator->rank();
      EXPECT_EQ(report.setting.compute_units, 32 - report.setting.consumers);
      EXPECT_FALSE(report.adaptation.empty());
      const auto of_all = communicator->exchange(static_cast<std::uint64_t>(report.setting.consumers), {});
      EXPECT_EQ(std::set<std::uint64_t>(of_all.begin(), of_all.end()).size(), 1U);
    });
  }
}

TEST_F(MoeOnDevice, TheFasterWayIsMeasured) {
  for (const double overlapped_us : {100.0, 300.0}) {
    run_ranks(2, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      MoeLayerOptions options = RepeatedCalls::options();
      options.overlap_if = MoeOverlapIf::kMeasured;
      RepeatedCalls repeated(communicator, options);
      MoeReport report;
      for (int i = 0; i < 12; ++i) {
        report = repeated.call();
        repeated.device().next_clock_us = report.method == Method::kOverlap ? overlapped_us : 200;
      }
      EXPECT_EQ(report.method, overlapped_us < 200 ? Method::kOverlap : Method::kSerial) << report.choice;
    });
  }
}

// For the device's tiles and units, of which consumers take some: that pays where the link is slow.
TEST_F(MoeOnDevice, TheFasterWayIsPredicted) {
  for (const double gbps : {0.0005, 1.0}) {
    MachineProfile profile;
    profile.name = "made up";
    profile.units = 32;
    profile.gemm.kernels.push_back(
        {.dtype = DType::kBFloat16, .tile_m = 4, .tile_n = 8, .unit_gflops = 0.001, .source = "made up"});
    profile.levels.push_back({.name = "link", .latency_us = 1, .bandwidth_gbps = gbps, .source = "made up"});
    run_ranks(2, {}, [&](const std::shared_ptr<Communicator>& communicator) {
      MoeLayerOptions options = RepeatedCalls::options();
      options.overlap_if = MoeOverlapIf::kPredicted;
      options.machine = std::make_shared<const MachineProfile>(profile);
      const MoeReport report = RepeatedCalls(communicator, options, 6).call();
      EXPECT_EQ(report.method, gbps < 1 ? Method::kOverlap : Method::kSerial) << report.choice;
    });
  }
}

// With other units each rank would choose other tiles, and their plans would not match.
TEST_F(MoeOnDevice, TilesAreChosenByTheUnitsOfRank0) {
  run_ranks(3, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    RepeatedCalls repeated(communicator, RepeatedCalls::options(), 10 + communicator->rank());
    repeated.call();
    EXPECT_EQ(repeated.device().tile_units, std::set<std::int64_t>{10});
  });
}

TEST_F(MoeOnDevice, PartsAndPhasesAreMeasured) {
  run_ranks(2, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    RepeatedCalls repeated(communicator, RepeatedCalls::options());
    EXPECT_EQ(repeated.call().phases.combine_us, 0);
    Timeline timeline;
    const MoeReport report = repeated.call(&timeline);
    EXPECT_GT(report.phases.dispatch_us, 0);
    EXPECT_GT(report.phases.combine_us, 0);
    EXPECT_FALSE(timeline.spans.empty());
    EXPECT_EQ(repeated.layer().combine_plan().grid.tile_n(), 8) << "what the device chose";
    EXPECT_EQ(repeated.layer().dispatch_plan().grid.tile_m(), 4);
    const MoeLayer::Parts parts = repeated.layer().measure_parts(repeated.weights());
    for (const double us : {parts.dispatch_gemm_us, parts.dispatch_transfer_us, parts.combine_gemm_us,
                            parts.combine_transfer_us, parts.dispatch_us, parts.combine_us})
      EXPECT_GT(us, 0);
  });
}

TEST_F(MoeOnDevice, RefusesWhatItCannotDo) {
  run_ranks(2, {}, [&](const std::shared_ptr<Communicator>& communicator) {
    DeviceRank on(communicator);
    MoeLayerOptions good;
    good.hidden = good.intermediate = 8;
    good.num_experts = 2;
    good.dtype = DType::kBFloat16;
    MoeLayerOptions options = good;
    options.dtype = DType::kFloat32;
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "bf16 and f16, not f32",
                              MoeLayer(on.context, options));
    options = good;
    options.order = MoeOrder::kExpertMajor;
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "needs order 'owner-major' and padding 'ragged'",
                              MoeLayer(on.context, options));
    options = good;
    options.adapt = true;
    options.transport = MoeTransport::kCollective;
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "which transport 'put' has",
                              MoeLayer(on.context, options));

    MoeLayer layer(on.context, good);
    const MoeRouting routing = make_routing(RoutingKind::kBalanced, communicator->rank(), 2, 5, 2, 1, 1);
    const std::vector<std::uint16_t> x(5 * 8), up(16 * 8), down(8 * 8);
    std::vector<std::uint16_t> out(5 * 8, 0xFFFF);
    const MoeWeights weights{up.data(), down.data()};
    on.device->refused = {x.data()};
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "x at",
                              layer.forward(x.data(), 8, routing, weights, out.data(), 8));
    on.device->refused = {down.data()};
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "down weights at",
                              layer.forward(x.data(), 8, routing, weights, out.data(), 8));
    EXPECT_EQ(out, std::vector<std::uint16_t>(5 * 8, 0xFFFF)) << "written in spite of the error";
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "backward needs a forward before it",
                              layer.backward(x.data(), 8, weights, {}));
    on.device->refused.clear();
    layer.forward(x.data(), 8, routing, weights, out.data(), 8);
    std::vector<float> by_up(16 * 8, 7);
    const MoeGradients gradients{.input = out.data(), .input_ld = 8, .up = by_up.data()};
    on.device->refused = {by_up.data()};
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "gradient of the up weights at",
                              layer.backward(x.data(), 8, weights, gradients));
    EXPECT_EQ(by_up, std::vector<float>(16 * 8, 7)) << "written in spite of the error";
    FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "measure_backward_parts needs a backward before it",
                              layer.measure_backward_parts());
  });
}

}  // namespace
}  // namespace flashoverlap::test

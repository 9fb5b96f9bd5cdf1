// The layer of experts on GPUs against the same layer in float64, token by token.
#include <random>

#include "gpu_test.h"
#include "moe_layer_call.h"

namespace flashoverlap::gpu_test {
GPU_TEST(moe_layer_random) {
  for (const int world : world_sizes()) {
    for (const CommunicatorKind kind : kinds_for(world)) {
      std::mt19937_64 rng(seed() + static_cast<std::uint64_t>(world));
      for (int i = 0; i < cases(8); ++i) {
        const MoeCase call = random_case(rng, world);
        shared_group(world, kind).run([&](Rank& rank) {
          LayerCall own(rank, call);
          for (const Method method : {Method::kOverlap, Method::kSerial, Method::kOverlap})
            own.run_and_check(method);
        });
      }
    }
  }
}

// Ranks with one expert and ranks with several tell each other nothing of how results lie: those of each
// rank's tiles, here of several columns.
GPU_TEST(moe_layer_serial_with_unequal_experts) {
  for (const int world : world_sizes()) {
    MoeCase call = small_case(world);
    call.options.hidden = 520;
    call.options.num_experts = world + 1;
    for (std::int32_t rank = 0; rank < world; ++rank) {
      call.routings[index(rank)] =
          make_routing(RoutingKind::kModerate, rank, world, 50 + rank, call.options.num_experts, 2, seed());
    }
    for (const CommunicatorKind kind : kinds_for(world)) {
      shared_group(world, kind).run([&](Rank& rank) {
        LayerCall own(rank, call);
        for (const Method method : {Method::kSerial, Method::kOverlap}) own.run_and_check(method);
      });
    }
  }
}

// Other counts in each call, so that plans go while the device still works with them.
GPU_TEST(moe_layer_calls_in_a_row) {
  for (const CommunicatorKind kind : kinds_for(world_sizes().front())) {
    const int world = world_sizes().front();
    const MoeCase call = small_case(world);
    std::vector<std::vector<MoeRouting>> routings(index(world));  // by rank
    for (std::int32_t rank = 0; rank < world; ++rank) {
      for (std::uint64_t i = 0; i < 5; ++i)
        routings[index(rank)].push_back(make_routing(RoutingKind::kModerate, rank, world, 50, 4, 2, 10 + i));
    }
    shared_group(world, kind).run([&](Rank& rank) {
      LayerCall(rank, call).run_in_a_row_and_check(routings[index(rank.rank)], 3);
    });
  }
}

GPU_TEST(moe_layer_one_rank) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  std::mt19937_64 rng(seed());
  for (int i = 0; i < cases(8); ++i) {
    MoeCase call = random_case(rng, 1);
    call.options.transport = i % 2 == 0 ? MoeTransport::kPut : MoeTransport::kCollective;
    call.options.padding = i % 4 == 0 ? MoePadding::kPaper : MoePadding::kRagged;
    shared_group(1, CommunicatorKind::kLocal).run([&](Rank& rank) {
      LayerCall own(rank, call);
      own.run_and_check(Method::kOverlap);
    });
  }
}

GPU_TEST(moe_layer_refuses_what_cannot_run) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  shared_group(1, CommunicatorKind::kLocal).run([&](Rank& rank) {
    const MoeCase good = small_case(1);
    MoeCase call = good;
    call.options.dtype = DType::kFloat32;
    GPU_EXPECT_ERROR(MoeLayer(*rank.context, call.options), "bf16 and f16, not f32");
    call = good;
    call.options.adapt = true;
    GPU_EXPECT_ERROR(MoeLayer(*rank.context, call.options), "adapt", "transport 'put'");

    MoeLayer layer(*rank.context, good.options);
    const MoeRouting& routing = good.routings.front();
    const DeviceMatrix x(50, 64, 64, DType::kBFloat16);
    const DeviceMatrix out(50, 64, 64, DType::kBFloat16);
    const DeviceMatrix up(4 * 64, 64, 64, DType::kBFloat16);
    const DeviceMatrix down(4 * 64, 32, 32, DType::kBFloat16);
    const MoeWeights weights{.up = up.data(), .down = down.data()};
    const std::vector<std::uint16_t> host(50 * 64);
    GPU_EXPECT_ERROR((void)layer.forward(host.data(), 64, routing, weights, out.data(), 64), "x at",
                     "host memory");
    GPU_EXPECT_ERROR(
        (void)layer.forward(x.data(), 64, routing, {.up = host.data(), .down = down.data()}, out.data(), 64),
        "up weights at", "host memory");
    GPU_EXPECT_ERROR((void)layer.measure_parts(weights), "needs a forward before it");
  });
}

}  // namespace flashoverlap::gpu_test

// Whole layers on GPUs against the same layers in float64, by every method, on poisoned outputs.
#include <chrono>
#include <thread>

#include "gpu_ranks.h"
#include "gpu_test.h"
#include "layers/cuda_place.h"
#include "support/layer_case.h"

namespace flashoverlap::gpu_test {
namespace {

using test::LayerCase;
using test::LayerKind;
using test::LayerShapes;

std::unique_ptr<layers::Place> place_of(const Rank& rank, DType dtype,
                                        GemmForm form = GemmForm::kPersistent) {
  return layers::make_cuda_place(rank.context_of(form), rank.options, *rank.stream, dtype, readable_memory());
}

void check_layer(Group& group, const LayerCase& call, DType dtype, GemmForm form = GemmForm::kPersistent) {
  group.run([&](Rank& rank) {
    const std::unique_ptr<layers::Place> place = place_of(rank, dtype, form);
    const std::string fault = test::fault_of_any_method(*call.make(*place));
    GPU_EXPECT(fault.empty(), fault << ", rank " << rank.rank << ": " << call.text << " " << name_of(dtype));
  });
}

void random_layers(LayerKind kind, std::uint64_t salt) {
  for (const int world : world_sizes()) {
    for (const CommunicatorKind communicator : kinds_for(world)) {
      LayerShapes shapes(seed() * 1000 + salt, world);
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kBFloat16, DType::kFloat16})
        check_layer(shared_group(world, communicator), shapes.pick_case(kind), dtype);
    }
  }
}

}  // namespace

GPU_TEST(layer_mlp_tpsp_random) {
  random_layers(LayerKind::kMlpTpsp, 1);
}

GPU_TEST(layer_linear_dp_random) {
  random_layers(LayerKind::kLinearDp, 2);
}

GPU_TEST(layer_attention_tpsp_random) {
  random_layers(LayerKind::kAttentionTpsp, 3);
}

GPU_TEST(layer_attention_up_random) {
  random_layers(LayerKind::kAttentionUp, 4);
}

GPU_TEST(layers_decomposed_random) {
  for (const int world : world_sizes()) {
    for (const CommunicatorKind communicator : kinds_for(world)) {
      LayerShapes shapes(seed() * 1000 + 6, world);
      for (const LayerKind kind : test::kLayerKinds) {
        check_layer(shared_group(world, communicator), shapes.pick_case(kind), DType::kBFloat16,
                    GemmForm::kDecomposed);
      }
    }
  }
}

// So many that scores are computed in several blocks of queries, the last one smaller.
GPU_TEST(layer_attention_in_blocks) {
  const int world = world_sizes().front();
  const layers::AttentionShape shape{.tokens = 5003, .heads = 4 * world, .head_size = 16};
  const LayerCase call{"attention of 5003 tokens",
                       [&](layers::Place& place) { return layers::make_attention_tpsp(place, shape); }};
  check_layer(shared_group(world, kinds_for(world).front()), call, DType::kBFloat16);
}

// Calls in a row without a look at the result between them, one rank late by turns.
GPU_TEST(layer_calls_in_a_row_with_late_ranks) {
  const int world = world_sizes().front();
  for (const CommunicatorKind communicator : kinds_for(world)) {
    for (const LayerKind kind : test::kLayerKinds) {
      LayerShapes shapes(seed() * 1000 + 5, world);
      const LayerCase call = shapes.pick_case(kind);
      shared_group(world, communicator).run([&](Rank& rank) {
        const std::unique_ptr<layers::Place> place = place_of(rank, DType::kBFloat16);
        const std::unique_ptr<layers::Layer> layer = call.make(*place);
        layer->poison();
        for (int i = 0; i < cases(10); ++i) {
          if (rank.rank == i % 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          layer->run();
        }
        const std::string fault = test::fault_of(*layer, Method::kOverlap);
        GPU_EXPECT(fault.empty(), fault << ", rank " << rank.rank << ": " << call.text);
      });
    }
  }
}

}  // namespace flashoverlap::gpu_test

// The configurations of arXiv 2607.19539, section 5.4, scaled down: 3 routings, 12 splits of the SMs between
// GEMM and consumer, 2 sizes of segments, 20 shapes, against float64, twice, with ranks late at random.
#include <algorithm>
#include <array>
#include <cstdio>
#include <mutex>

#include "lateness.h"
#include "moe_layer_call.h"

namespace flashoverlap::gpu_test {
namespace {

constexpr std::array<std::int64_t, 12> kConsumers = {1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48};
constexpr std::array<std::int64_t, 2> kSegmentBands = {1, 2};
constexpr std::uint64_t kShapes = 20;
constexpr double kMostError = 8e-3;

/// Sizes that fit tiles, and some that do not.
MoeCase shape(std::uint64_t number, RoutingKind routing, int world) {
  MoeCase call;
  call.seed = 100 + number;
  call.options.hidden = std::array<std::int64_t, 5>{64, 72, 128, 264, 96}[number % 5];
  call.options.intermediate = number % 2 == 0 ? 64 : 40;
  call.options.num_experts = number % 3 == 0 ? 16 : 8;
  call.options.dtype = number % 4 == 0 ? DType::kBFloat16 : DType::kFloat16;
  call.options.transport = MoeTransport::kPut;
  call.options.poison_workspace = true;
  const std::int32_t top_k = number < kShapes / 2 ? 2 : 4;
  for (std::int32_t rank = 0; rank < world; ++rank) {
    call.routings.push_back(make_routing(routing, rank, world, 40 + 11 * static_cast<std::int64_t>(number),
                                         call.options.num_experts, top_k, call.seed));
  }
  return call;
}

struct Errors {
  std::mutex mutex;
  double worst = 0;
  int configurations = 0;
};

void run_shape(Group& group, const MoeCase& call, std::uint64_t salt, Errors& errors) {
  group.run([&](Rank& rank) {
    LayerCall own(rank, call);
    Lateness delay(rank, salt);
    for (const std::int64_t consumers : kConsumers) {
      for (const std::int64_t bands : kSegmentBands) {
        own.use(consumers, bands);
        delay();
        const double error = own.run_for_error(Method::kOverlap);
        GPU_EXPECT(error <= kMostError, "error " << error << ", " << consumers << " consumers, " << bands
                                                 << " bands a segment, rank " << rank.rank << ": "
                                                 << call.text());
        const std::scoped_lock lock(errors.mutex);
        errors.worst = std::max(errors.worst, error);
        errors.configurations += rank.rank == 0 ? 1 : 0;
      }
    }
  });
}

}  // namespace

GPU_TEST(moe_configurations) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  GroupOptions options;
  options.world_size = 4;
  options.partitions = false;  // consumers take SMs from the GEMM
  Group group(options);
  for (const std::uint64_t pass : {1U, 2U}) {
    Errors errors;
    for (std::uint64_t number = 0; number < kShapes; ++number) {
      for (const RoutingKind routing : {RoutingKind::kBalanced, RoutingKind::kModerate, RoutingKind::kStress})
        run_shape(group, shape(number, routing, options.world_size), 10 * number + pass, errors);
    }
    std::printf("  pass %d: %d configurations, largest relative error %.3g (limit %.3g)\n",
                static_cast<int>(pass), errors.configurations, errors.worst, kMostError);
  }
}

}  // namespace flashoverlap::gpu_test

// Operators on the GPU: random shapes against exact integer references, both methods, all world sizes that
// share one GPU.
#include <algorithm>

#include "flashoverlap/plan_builders.h"
#include "gemm_choice.h"
#include "gpu_case.h"
#include "gpu_random.h"
#include "gpu_test.h"

namespace flashoverlap::gpu_test {
namespace {

// Rows of A and B begin at multiples of 16 bytes, whatever k is.
std::int64_t aligned_padding(std::int64_t k, std::int64_t extra) {
  return (k + 7) / 8 * 8 - k + 8 * extra;
}

std::vector<std::int64_t> random_partition(Random& random, std::int64_t waves) {
  std::vector<std::int64_t> partition;
  while (waves > 0) {
    partition.push_back(random.pick(1, std::min<std::int64_t>(waves, 3)));
    waves -= partition.back();
  }
  return partition;
}

std::int64_t waves_of(const Case& call, int world_size, std::int64_t units) {
  PlanOptions options;
  options.world_size = world_size;
  options.m = call.gemm.m;
  options.n = call.gemm.n;
  options.k = call.gemm.k;
  options.tile_m = call.gemm.tile_m;
  options.tile_n = call.gemm.tile_n;
  options.resources.compute_units = units;
  return call.op == Op::kReduceScatter ? num_waves_reduce_scatter(options, call.rows) : num_waves(options);
}

Case random_case(Random& random, int world_size, std::int64_t max_m, std::int64_t max_n) {
  Case call;
  call.op = random.one_of({Op::kAllReduce, Op::kReduceScatter, Op::kAllToAll});
  call.gemm.dtype = random.pick(0, 3) == 0 ? DType::kBFloat16 : DType::kFloat16;
  const auto variants = cuda::variants_for(0, call.gemm.dtype);
  const cuda::SignalGemmVariant& variant =
      *variants[static_cast<std::size_t>(random.pick(0, std::ssize(variants) - 1))];
  call.gemm.tile_m = variant.tile_rows;
  call.gemm.tile_n = variant.tile_cols;
  call.gemm.swizzle = random.pick(1, 4);
  call.gemm.m = random.pick(1, max_m);
  call.gemm.n = random.pick(1, max_n);
  // bf16 holds integers up to 256: few columns.
  call.gemm.k = random.pick(1, call.gemm.dtype == DType::kBFloat16 ? 5 : 160);
  call.padding = aligned_padding(call.gemm.k, random.pick(0, 2));
  call.rows = random.one_of({RowOwnership::kContiguous, RowOwnership::kBlockCyclic});
  call.with_epilogue = random.pick(0, 1) == 1;
  call.seed = random.pick(0, 1000);
  if (call.op == Op::kAllToAll) {
    std::int64_t longest = 0;
    for (int r = 0; r < world_size; ++r) {
      std::vector<std::int32_t> destinations(static_cast<std::size_t>(random.pick(0, max_m)));
      const bool sorted = random.pick(0, 1) == 1;
      for (auto& d : destinations) d = static_cast<std::int32_t>(random.pick(0, world_size - 1));
      if (sorted) std::sort(destinations.begin(), destinations.end());
      longest = std::max(longest, std::ssize(destinations));
      call.destinations.push_back(std::move(destinations));
    }
    call.gemm.m = longest;
  }
  return call;
}

void random_cases(int world_size, CommunicatorKind kind, int count, std::uint64_t salt) {
  Group& group = shared_group(world_size, kind);
  Random random(salt + static_cast<std::uint64_t>(world_size) * 10 +
                (kind == CommunicatorKind::kNccl ? 1U : 0U));
  for (int i = 0; i < cases(count); ++i) {
    Case call = random_case(random, world_size, 900, 900);
    const auto shape = [&] {
      std::int64_t units = 1;
      group.run([&](Rank& rank) {
        if (rank.rank != group.first_rank()) return;
        units = rank.context->executor()
                    .suggest({.m = call.gemm.m, .n = call.gemm.n, .k = call.gemm.k, .dtype = call.gemm.dtype})
                    ->resources.compute_units;
      });
      return units;
    };
    call.gemm.partition = random_partition(random, waves_of(call, world_size, shape()));
    run_case(group, call);
  }
}

}  // namespace

GPU_TEST(random_shapes_one_rank) {
  random_cases(1, CommunicatorKind::kLocal, 10, 1);
}

GPU_TEST(random_shapes_local) {
  for (const int world : world_sizes()) random_cases(world, CommunicatorKind::kLocal, 12, 2);
}

GPU_TEST(random_shapes_copy_engine) {
  for (const int world : world_sizes()) {
    random_cases(world, CommunicatorKind::kTwoStep, 12, 4);
    random_cases(world, CommunicatorKind::kCopyEngine, 12, 5);
  }
}

GPU_TEST(random_shapes_nccl) {
  if (const std::string why = why_no_nccl(world_sizes().front()); !why.empty()) throw Skip(why);
  for (const int world : world_sizes()) random_cases(world, CommunicatorKind::kNccl, 12, 3);
}

// Everything left open: tile, swizzle and partition are chosen.
GPU_TEST(defaults_on_larger_shapes) {
  const int world = world_sizes().front();
  for (const CommunicatorKind kind : kinds_for(world)) {
    for (const Op op : {Op::kAllReduce, Op::kReduceScatter}) {
      Case call;
      call.op = op;
      call.gemm.dtype = DType::kFloat16;
      call.gemm.m = 4096;  // 24 MiB: two or three groups
      call.gemm.n = 3072;
      call.gemm.k = 64;
      call.leaves_partition_open = true;
      run_case(shared_group(world, kind), call);
    }
  }
}

GPU_TEST(edges) {
  const int world = world_sizes().front();
  for (const CommunicatorKind kind : kinds_for(world)) {
    Group& group = shared_group(world, kind);
    for (const Op op : {Op::kAllReduce, Op::kReduceScatter}) {
      for (const auto& [m, n, k] : std::vector<std::array<std::int64_t, 3>>{{0, 64, 64},
                                                                            {64, 0, 64},
                                                                            {64, 64, 0},
                                                                            {1, 1, 1},
                                                                            {1, 8, 8},
                                                                            {3, 257, 9},
                                                                            {513, 1, 16},
                                                                            {257, 258, 8}}) {
        Case call;
        call.op = op;
        call.gemm.dtype = DType::kFloat16;
        call.gemm.m = m;
        call.gemm.n = n;
        call.gemm.k = k;
        call.padding = aligned_padding(k, 0);
        if (k == 0) call.with_epilogue = true;
        run_case(group, call);
      }
    }
  }
}

GPU_TEST(single_group_on_the_signal_gemm) {
  GroupOptions options;
  options.serial_by_cublas = false;
  options.compute_sms = 16;
  Group group(options);
  Random random(7);
  for (int i = 0; i < cases(6); ++i) run_case(group, random_case(random, 2, 400, 400));
}

GPU_TEST(waiting_by_stream_memory_operations) {
  for (const CommunicatorKind kind : kinds_for(2)) {
    GroupOptions options;
    options.kind = kind;
    options.wait = GroupWait::kStreamMemory;
    options.compute_sms = 8;
    Group group(options);
    Random random(8);
    for (int i = 0; i < cases(5); ++i) run_case(group, random_case(random, 2, 900, 900));
  }
}

GPU_TEST(without_partitions) {
  for (const CommunicatorKind kind : kinds_for(2)) {
    GroupOptions options;
    options.kind = kind;
    options.partitions = false;
    Group group(options);
    Random random(9);
    for (int i = 0; i < cases(5); ++i) run_case(group, random_case(random, 2, 2000, 1500));
  }
}

GPU_TEST(paced_link) {
  GroupOptions options;
  options.link = {.bandwidth_gbps = 10, .latency_us = 20};
  options.compute_sms = 8;
  Group group(options);
  Random random(10);
  for (int i = 0; i < cases(3); ++i) run_case(group, random_case(random, 2, 900, 900));
}

}  // namespace flashoverlap::gpu_test

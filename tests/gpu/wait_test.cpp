// Signals: whoever is let through by a counter must see all data of the group; counters are ready for the
// next launch.
#include <chrono>
#include <random>
#include <thread>

#include "flashoverlap/plan_builders.h"
#include "gemm_case.h"
#include "gpu_test.h"
#include "wait.h"

namespace flashoverlap::gpu_test {
namespace {

struct Streams {
  Streams() {
    FLASHOVERLAP_CUDA_CHECK(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    FLASHOVERLAP_CUDA_CHECK(cudaStreamCreateWithFlags(&watch, cudaStreamNonBlocking));
    FLASHOVERLAP_CUDA_CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    FLASHOVERLAP_CUDA_CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  }
  ~Streams() {
    cudaEventDestroy(fork);
    cudaEventDestroy(join);
    cudaStreamDestroy(compute);
    cudaStreamDestroy(watch);
  }
  cudaStream_t compute{}, watch{};
  cudaEvent_t fork{}, join{};
};

const cuda::SignalGemmVariant* find_variant(int capability, cuda::GemmType type) {
  for (const cuda::SignalGemmVariant* variant : cuda::signal_gemm_variants()) {
    if (variant->min_compute_capability == capability && variant->type == type &&
        variant->operand_alignment == 8)
      return variant;
  }
  return nullptr;
}

int device_capability() {
  cudaDeviceProp properties{};
  FLASHOVERLAP_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  return properties.major * 10 + properties.minor;
}

GemmCase make_case(const cuda::SignalGemmVariant& variant, std::int64_t m, std::int64_t n, std::int64_t k,
                   bool by_rows) {
  PlanOptions options;
  options.world_size = 4;
  options.rank = 1;
  options.dtype = DType::kBFloat16;
  options.m = m;
  options.n = n;
  options.k = k;
  options.tile_m = variant.tile_rows;
  options.tile_n = variant.tile_cols;
  constexpr int kSms =
      32;  // few, so that there are many waves and the last groups are far from ready when the first is
  options.resources.compute_units = kSms / variant.blocks_per_tile;
  const OverlapPlan plan =
      by_rows ? plan_reduce_scatter(options, RowOwnership::kBlockCyclic) : plan_all_reduce(options);
  return GemmCase(plan, variant, 1, kSms, {}, seed());
}

enum class Way { kKernel, kStreamMemory };

// poison; then on one stream the GEMM, on the other for each group: wait, compare at once.
void enqueue_round(const GemmCase& test, const Streams& streams, Way way, unsigned* differences) {
  test.poison(streams.compute);
  FLASHOVERLAP_CUDA_CHECK(cudaEventRecord(streams.fork, streams.compute));
  FLASHOVERLAP_CUDA_CHECK(cudaStreamWaitEvent(streams.watch, streams.fork));
  test.launch(streams.compute);
  for (std::int64_t group = 0; group < static_cast<std::int64_t>(test.plan().groups.size()); ++group) {
    if (way == Way::kKernel) {
      cuda::launch_wait_kernel(
          {.counter = test.tables().counter(group), .target = test.tables().target(group)}, streams.watch);
    } else {
      cuda::enqueue_wait_value(test.tables().counter(group), test.tables().target(group), streams.watch);
    }
    const GemmCase::Range range = test.packed_range(group);
    count_differences(test.packed() + range.begin, test.expected_packed() + range.begin, range.count,
                      differences, streams.watch);
  }
  FLASHOVERLAP_CUDA_CHECK(cudaEventRecord(streams.join, streams.watch));
  FLASHOVERLAP_CUDA_CHECK(cudaStreamWaitEvent(streams.compute, streams.join));
}

void run_rounds(Way way, bool in_graph, bool by_rows) {
  cuda::load_wait_kernel();
  const int capability = device_capability();
  for (const int wanted : {90, 80}) {
    const cuda::SignalGemmVariant* variant = find_variant(wanted, cuda::GemmType::kBf16);
    if (variant == nullptr || capability < wanted || (variant->exact_capability && capability != wanted))
      continue;
    const GemmCase test = make_case(*variant, 2048, 2048, 256, by_rows);
    GPU_EXPECT(test.plan().groups.size() > 2, "the plan has " << test.plan().groups.size() << " groups");
    const cuda::DeviceBuffer differences = device_copy(std::vector<unsigned>{0});
    auto* counter = static_cast<unsigned*>(differences.data());
    const Streams streams;
    const int rounds = cases(30);
    if (in_graph) {
      cudaGraph_t graph{};
      cudaGraphExec_t replay{};
      FLASHOVERLAP_CUDA_CHECK(cudaStreamBeginCapture(streams.compute, cudaStreamCaptureModeThreadLocal));
      enqueue_round(test, streams, way, counter);
      FLASHOVERLAP_CUDA_CHECK(cudaStreamEndCapture(streams.compute, &graph));
      FLASHOVERLAP_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
      for (int round = 0; round < rounds; ++round)
        FLASHOVERLAP_CUDA_CHECK(cudaGraphLaunch(replay, streams.compute));
      FLASHOVERLAP_CUDA_CHECK(cudaStreamSynchronize(streams.compute));
      FLASHOVERLAP_CUDA_CHECK(cudaGraphExecDestroy(replay));
      FLASHOVERLAP_CUDA_CHECK(cudaGraphDestroy(graph));
    } else {
      for (int round = 0; round < rounds; ++round) enqueue_round(test, streams, way, counter);
      FLASHOVERLAP_CUDA_CHECK(cudaStreamSynchronize(streams.compute));
    }
    const unsigned wrong = host_copy<unsigned>(differences)[0];
    GPU_EXPECT(wrong == 0,
               variant->name << ": " << wrong << " elements were not there when their group was ready");
    test.expect_counters_zero(variant->name);
    test.expect_packed(variant->name);
  }
}

}  // namespace

GPU_TEST(kernel_signal_means_data_wait_kernel) {
  run_rounds(Way::kKernel, false, false);
}
GPU_TEST(kernel_signal_means_data_wait_value) {
  run_rounds(Way::kStreamMemory, false, false);
}
GPU_TEST(kernel_signal_means_data_row_slabs) {
  run_rounds(Way::kKernel, false, true);
}
GPU_TEST(kernel_signal_in_graph_wait_kernel) {
  run_rounds(Way::kKernel, true, false);
}
GPU_TEST(kernel_signal_in_graph_wait_value) {
  run_rounds(Way::kStreamMemory, true, false);
}

GPU_TEST(kernel_wait_times_out) {
  const cuda::DeviceBuffer counter = device_copy(std::vector<std::uint32_t>{3});
  cuda::WaitError* error = nullptr;
  FLASHOVERLAP_CUDA_CHECK(
      cudaHostAlloc(reinterpret_cast<void**>(&error), sizeof *error, cudaHostAllocMapped));
  *error = {};
  cuda::launch_wait_kernel({.counter = static_cast<std::uint32_t*>(counter.data()),
                            .target = 4,
                            .group = 7,
                            .error = error,
                            .timeout_ns = 20'000'000},
                           nullptr);
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  const cuda::WaitError seen = *error;
  FLASHOVERLAP_CUDA_CHECK(cudaFreeHost(error));
  GPU_EXPECT(seen.code == 1 && seen.group == 7 && seen.seen == 3 && seen.expected == 4,
             "code " << seen.code << ", group " << seen.group << ", seen " << seen.seen << ", expected "
                     << seen.expected);
  GPU_EXPECT(host_copy<std::uint32_t>(counter)[0] == 3, "a wait that failed must not reset the counter");
}

GPU_TEST(kernel_wait_aborts) {
  const cuda::DeviceBuffer counter = device_copy(std::vector<std::uint32_t>{0});
  struct Shared {
    cuda::WaitError error;
    volatile std::uint32_t abort;
  };
  Shared* shared = nullptr;
  FLASHOVERLAP_CUDA_CHECK(
      cudaHostAlloc(reinterpret_cast<void**>(&shared), sizeof *shared, cudaHostAllocMapped));
  shared->error = {};
  shared->abort = 0;
  cuda::launch_wait_kernel({.counter = static_cast<std::uint32_t*>(counter.data()),
                            .target = 1,
                            .error = &shared->error,
                            .abort = const_cast<const std::uint32_t*>(&shared->abort)},
                           nullptr);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const cudaError_t state = cudaStreamQuery(nullptr);
  (void)cudaGetLastError();  // "not ready" would be reported by the next check
  GPU_EXPECT(state == cudaErrorNotReady, "the wait ended without a reason");
  shared->abort = 1;
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  const std::uint32_t code = shared->error.code;
  FLASHOVERLAP_CUDA_CHECK(cudaFreeHost(shared));
  GPU_EXPECT(code == 2, "code " << code);
}

}  // namespace flashoverlap::gpu_test

// Puts into NVSHMEM's symmetric heap. Ranks are processes: started as threads, all of these but one are
// skipped.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>

#include "check.h"
#include "gpu_test.h"
#include "moe_layer_call.h"
#include "nvshmem_heap.h"
#include "nvshmem_library.h"

namespace flashoverlap::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kHeapBytes = std::int64_t{256} << 20U;

void require_nvshmem() {
  if (!ranks_are_processes()) throw Skip("ranks are threads of one process");
  try {
    (void)cuda::nvshmem();
  } catch (const Error& error) {
    throw Skip(error.what());
  }
}

GroupOptions with_nvshmem(CommunicatorKind kind) {
  GroupOptions options = few_sms(kind);
  options.put_memory = PutMemory::kNvshmem;
  options.put_memory_bytes = kHeapBytes;
  return options;
}

std::vector<CommunicatorKind> kinds() {
  std::vector<CommunicatorKind> kinds{CommunicatorKind::kLocal};
  if (why_no_nccl(world_sizes().front()).empty()) kinds.push_back(CommunicatorKind::kNccl);
  return kinds;
}

/// What `from` writes into the memory of `to`.
int byte_of(int from, int to) {
  return 1 + 16 * from + to;
}

/// Every rank writes to every rank's memory, each of which has another size, and nobody else's share of it.
void write_to_all_and_check(Communicator& communicator, cuda::PutHeap& heap) {
  constexpr std::size_t kShare = 100'000;
  const int rank = communicator.rank();
  const int size = communicator.size();
  const auto bytes = static_cast<std::size_t>(size) * kShare;
  const std::shared_ptr<void> first = heap.allocate(1000 * (rank + 1), "a test");
  const std::shared_ptr<void> second =
      heap.allocate(static_cast<std::int64_t>(bytes) + 5000 * rank, "a test");
  FLASHOVERLAP_CUDA_CHECK(cudaMemset(second.get(), 0, bytes));
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  const std::vector<cuda::PeerMemory> all = heap.share({first.get(), second.get()}, {});
  for (int to = 0; to < size; ++to) {
    char* const share = static_cast<char*>(all[index(to)].second) + index(rank) * kShare;
    FLASHOVERLAP_CUDA_CHECK(cudaMemset(share, byte_of(rank, to), kShare));
  }
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  (void)communicator.exchange(std::uint64_t{0}, {});
  std::vector<unsigned char> got(bytes);
  FLASHOVERLAP_CUDA_CHECK(cudaMemcpy(got.data(), second.get(), bytes, cudaMemcpyDefault));
  for (std::size_t i = 0; i < bytes; ++i) {
    const int from = static_cast<int>(i / kShare);
    GPU_EXPECT(got[i] == byte_of(from, rank), "byte " << i << " is " << int{got[i]} << ", rank " << from
                                                      << " wrote " << byte_of(from, rank));
  }
  (void)communicator.exchange(std::uint64_t{0}, {});  // nobody's memory goes before all have looked
}

/// Leaves nothing of the heap free.
std::vector<std::shared_ptr<void>> take_all(cuda::PutHeap& heap) {
  std::vector<std::shared_ptr<void>> taken;
  for (std::int64_t bytes = kHeapBytes; bytes >= cuda::Slab::kAlignment;) {
    try {
      taken.push_back(heap.allocate(bytes, "a test"));
    } catch (const Error&) {
      bytes /= 2;
    }
  }
  return taken;
}

/// After these the ranks' connection is gone, so each runs alone, and only when it is asked for.
void require_that_it_may_break() {
  require_nvshmem();
  if (std::getenv("FLASHOVERLAP_TEST_BREAKS") == nullptr)
    throw Skip("ends the ranks' connection; set FLASHOVERLAP_TEST_BREAKS and run it alone");
}

}  // namespace

GPU_TEST(nvshmem_memory_of_all_ranks) {
  require_nvshmem();
  Group(with_nvshmem(CommunicatorKind::kLocal)).run([](Rank& rank) {
    cuda::NvshmemHeap heap(*rank.communicator, rank.options.device, kHeapBytes, {});
    for (int i = 0; i < 2; ++i) write_to_all_and_check(*rank.communicator, heap);
  });
}

// Of some of the processes that NVSHMEM was initialised for.
GPU_TEST(nvshmem_memory_of_some_ranks) {
  require_nvshmem();
  Group(with_nvshmem(CommunicatorKind::kLocal)).run([](Rank& rank) {
    const int half = rank.world_size / 2;
    std::vector<int> ranks;
    for (int r = 0; r < rank.world_size; ++r)
      if ((r < half) == (rank.rank < half)) ranks.push_back(r);
    const std::shared_ptr<Communicator> some = rank.communicator->subgroup(ranks);
    cuda::NvshmemHeap heap(*some, rank.options.device, kHeapBytes, {});
    write_to_all_and_check(*some, heap);
  });
}

GPU_TEST(nvshmem_says_what_is_too_much) {
  require_nvshmem();
  Group(with_nvshmem(CommunicatorKind::kLocal)).run([](Rank& rank) {
    cuda::NvshmemHeap heap(*rank.communicator, rank.options.device, kHeapBytes, {});
    GPU_EXPECT_ERROR((void)heap.allocate(2 * kHeapBytes, "a test"), "a test: 536870912 bytes are needed",
                     "of 268435456 that this process took", "put_memory_bytes");
    CudaOptions options = rank.options;
    options.put_memory_bytes = 0;
    GPU_EXPECT_ERROR((void)make_cuda_executor(rank.communicator, options), "put_memory_bytes is 0");
  });
}

GPU_TEST(nvshmem_layers) {
  require_nvshmem();
  for (const CommunicatorKind kind : kinds()) {
    Group group(with_nvshmem(kind));
    const int world = group.options().world_size;
    std::mt19937_64 rng(seed() + 700);
    for (int i = 0; i < cases(6); ++i) {
      const MoeCase call = with_puts(random_case(rng, world, 500), rng);
      group.run([&](Rank& rank) {
        LayerCall own(rank, call);
        for (const Method method : {Method::kOverlap, Method::kSerial, Method::kOverlap})
          own.run_and_check(method);
      });
    }
  }
}

// Other counts in each call, ranks late at random: nobody may overwrite what another has yet to read.
GPU_TEST(nvshmem_calls_in_a_row) {
  require_nvshmem();
  for (const CommunicatorKind kind : kinds()) {
    Group group(with_nvshmem(kind));
    std::mt19937_64 rng(seed() + 800);
    const MoeCase call = with_puts(small_case(group.options().world_size), rng);
    group.run([&](Rank& rank) { run_late_calls_in_a_row(rank, call); });
  }
}

GPU_TEST(nvshmem_refuses_threads) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  shared_group(2, CommunicatorKind::kLocal).run([](Rank& rank) {
    CudaOptions options = rank.options;
    options.put_memory = PutMemory::kNvshmem;
    GPU_EXPECT_ERROR((void)make_cuda_executor(rank.communicator, options), "NVSHMEM: ranks 0 and 1",
                     "threads of one process");
  });
}

// Without room on one rank the call fails on all.
GPU_TEST(nvshmem_no_room_on_one_rank) {
  require_that_it_may_break();
  Group group(with_nvshmem(CommunicatorKind::kLocal));
  std::mt19937_64 rng(seed());
  const MoeCase call = with_puts(small_case(group.options().world_size), rng);
  const std::vector<std::string> errors = group.run_all(
      [&](Rank& rank) {
        cuda::NvshmemHeap heap(*rank.communicator, rank.options.device, kHeapBytes, {});
        std::vector<std::shared_ptr<void>> taken;
        if (rank.rank == 0) taken = take_all(heap);
        LayerCall(rank, call).run_and_check(Method::kOverlap);
      },
      true);
  const std::string& error = errors[index(group.first_rank())];
  GPU_EXPECT(error.find("are needed of NVSHMEM's memory") != std::string::npos, "this rank says: " << error);
}

// A process that ends in the middle of its work: the others say so within the time-out.
GPU_TEST(nvshmem_rank_dies) {
  require_that_it_may_break();
  GroupOptions options = with_nvshmem(CommunicatorKind::kLocal);
  options.timeout = 3s;
  Group group(options);
  std::mt19937_64 rng(seed());
  const MoeCase call = with_puts(small_case(options.world_size), rng);
  std::chrono::steady_clock::time_point begin;
  const std::vector<std::string> errors = group.run_all(
      [&](Rank& rank) {
        LayerCall own(rank, call);
        own.run_and_check(Method::kOverlap);
        begin = std::chrono::steady_clock::now();
        if (rank.rank == rank.world_size - 1) std::_Exit(0);
        own.run_and_check(Method::kOverlap);
      },
      true);
  GPU_EXPECT(!errors[index(group.first_rank())].empty(), "this rank has noticed nothing");
  GPU_EXPECT(std::chrono::steady_clock::now() - begin < 15s, "the time-out is 3 s");
}

}  // namespace flashoverlap::gpu_test

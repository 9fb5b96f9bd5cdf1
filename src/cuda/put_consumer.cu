#include "put_consumer.h"

#include <cuda/atomic>

#include "check.h"
#include "peer_copy.cuh"
#include "ptx.cuh"

namespace flashoverlap::cuda {
namespace {

// See wait.cu.
constexpr unsigned kPollIntervalNs = 40;
constexpr unsigned kPollsPerCheck = 256;

/// Whether a wait that has not come to its end goes on. kFailedBefore: another one gave up, and has said why.
enum class Verdict { kGoOn, kTimeout, kAborted, kFailedBefore };

template <class Params>
__device__ Verdict look_around(const Params& params, std::uint64_t begin_ns) {
  if (params.error != nullptr && ptx::ld_acquire_sys(&params.error->code) != 0) return Verdict::kFailedBefore;
  if (params.abort != nullptr && ptx::ld_acquire_sys(params.abort) != 0) return Verdict::kAborted;
  return ptx::global_timer_ns() - begin_ns > params.timeout_ns ? Verdict::kTimeout : Verdict::kGoOn;
}

__device__ void record(WaitError* error, std::uint32_t code, std::uint32_t group, std::uint32_t seen,
                       std::uint32_t expected) {
  if (error == nullptr) return;
  error->group = group;
  error->seen = seen;
  error->expected = expected;
  ptx::st_release_sys(&error->code, code);
}

// Until the group is complete; false: it will not be.
__device__ bool wait_for_segment(const ConsumerParams& params, const PutWork& put) {
  if (put.tiles == 0 || params.counters == nullptr) return true;
  const std::uint32_t target = put.tiles * params.signals_per_tile;
  const std::uint64_t begin = ptx::global_timer_ns();
  for (unsigned poll = 1;; ++poll) {
    const std::uint32_t seen = ptx::ld_acquire_gpu(params.counters + put.group);
    if (seen >= target) return true;
    if (poll % kPollsPerCheck == 0) {
      const Verdict verdict = look_around(params, begin);
      if (verdict == Verdict::kGoOn) continue;
      // What block 0 has seen complete the others will see, too.
      if (verdict != Verdict::kFailedBefore && blockIdx.x == 0) {
        record(params.error, verdict == Verdict::kTimeout ? kSegmentTimeout : kSegmentAborted,
               static_cast<std::uint32_t>(put.group), seen, target);
      }
      return false;
    }
    __nanosleep(kPollIntervalNs);
  }
}

__global__ void __launch_bounds__(32)
    wait_for_first_segment_kernel(const __grid_constant__ ConsumerParams params) {
  if (threadIdx.x != 0) return;
  const std::uint64_t begin = ptx::global_timer_ns();
  if (params.times != nullptr) params.times->begin_ns = begin;
  (void)wait_for_segment(params, params.puts[0]);
  if (params.times != nullptr) params.times->idle_ns = ptx::global_timer_ns() - begin;
}

// This block's part of a put.
__device__ void copy_part(const ConsumerParams& params, const PutWork& put) {
  const char* const from = params.packed + put.from;
  char* const to = params.received[put.peer] + put.to;
  const auto bits = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
                    static_cast<std::uintptr_t>(put.bytes);
  if (bits % sizeof(uint4) == 0) {
    copy_by_grid(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), put.bytes / 16);
  } else {
    copy_by_grid(reinterpret_cast<std::uint16_t*>(to), reinterpret_cast<const std::uint16_t*>(from),
                 put.bytes / 2);
  }
}

// Behind this block's part of put `i`, by one thread. The last block tells the peer. Words rise in order: a
// block ends put i + 1 only after it has told of put i, where that was its own to tell.
__device__ void end_put(const ConsumerParams& params, std::int32_t i, const PutWork& put,
                        std::uint64_t begin_ns) {
  while (put.paced_ns > 0 && ptx::global_timer_ns() - begin_ns < put.paced_ns) __nanosleep(kPollIntervalNs);
  __threadfence_system();  // what the block's threads wrote across a link comes before the word
  const ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device> done(params.done[i]);
  if (done.fetch_add(1, ::cuda::std::memory_order_acq_rel) + 1 < gridDim.x) return;
  params.done[i] = 0;
  ptx::st_release_sys(params.count[put.peer], params.before[put.peer] + put.ordinal);
  if (i + 1 == params.num_puts && params.times != nullptr) params.times->end_ns = ptx::global_timer_ns();
}

__global__ void __launch_bounds__(kPeerThreads, kConsumersPerSm)
    consumer_kernel(const __grid_constant__ ConsumerParams params) {
  __shared__ bool is_there;
  std::uint64_t idle_ns = 0;
  std::uint64_t begin_ns = 0;
  std::int32_t group = -1;
  for (std::int32_t i = 0; i < params.num_puts; ++i) {
    const PutWork put = params.puts[i];
    if (threadIdx.x == 0) begin_ns = ptx::global_timer_ns();
    if (put.group != group) {
      group = put.group;
      if (threadIdx.x == 0) {
        is_there = wait_for_segment(params, put);
        const std::uint64_t now = ptx::global_timer_ns();
        idle_ns += now - begin_ns;
        begin_ns = now;
      }
      __syncthreads();
      if (!is_there) return;
    }
    copy_part(params, put);
    __syncthreads();
    if (threadIdx.x == 0) end_put(params, i, put, begin_ns);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && params.times != nullptr) params.times->idle_ns += idle_ns;
}

__global__ void __launch_bounds__(32) wait_for_puts_kernel(const __grid_constant__ WaitForPutsParams params) {
  if (threadIdx.x != 0) return;
  const std::uint64_t begin = ptx::global_timer_ns();
  for (std::int32_t rank = 0; rank < params.num_ranks; ++rank) {
    for (unsigned poll = 1;; ++poll) {
      const std::uint32_t seen = ptx::ld_acquire_sys(params.counts + rank * params.stride);
      const auto missing = static_cast<std::int32_t>(params.expected[rank] - seen);
      if (missing <= 0) break;
      if (poll % kPollsPerCheck == 0) {
        const Verdict verdict = look_around(params, begin);
        if (verdict == Verdict::kGoOn) continue;
        if (verdict != Verdict::kFailedBefore) {
          record(params.error, verdict == Verdict::kTimeout ? kPutsTimeout : kPutsAborted,
                 static_cast<std::uint32_t>(rank), params.puts[rank] - static_cast<std::uint32_t>(missing),
                 params.puts[rank]);
        }
        return;
      }
      __nanosleep(kPollIntervalNs);
    }
  }
}

}  // namespace

void launch_wait_for_first_segment(const ConsumerParams& params, cudaStream_t stream) {
  if (params.num_puts == 0) return;
  wait_for_first_segment_kernel<<<1, 1, 0, stream>>>(params);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_consumer(const ConsumerParams& params, int num_blocks, cudaStream_t stream) {
  if (params.num_puts == 0) return;
  consumer_kernel<<<num_blocks, kPeerThreads, 0, stream>>>(params);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_wait_for_puts(const WaitForPutsParams& params, cudaStream_t stream) {
  wait_for_puts_kernel<<<1, 1, 0, stream>>>(params);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void load_put_kernels() {
  cudaFuncAttributes attributes;
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, wait_for_first_segment_kernel));
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, consumer_kernel));
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, wait_for_puts_kernel));
}

}  // namespace flashoverlap::cuda

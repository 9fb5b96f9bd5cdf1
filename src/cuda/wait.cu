#include "wait.h"

#include "check.h"
#include "ptx.cuh"

namespace flashoverlap::cuda {
namespace {

// Between polls, so that the memory system is not flooded by one address; far below the time a launch takes.
constexpr unsigned kPollIntervalNs = 40;
// The clock and the abort flag (possibly in host memory, across the bus) are looked at every so many polls.
constexpr unsigned kPollsPerCheck = 256;

__device__ void record(const WaitParams& params, std::uint32_t code, std::uint32_t seen) {
  if (params.error == nullptr) return;
  params.error->group = params.group;
  params.error->seen = seen;
  params.error->expected = params.target;
  ptx::st_release_sys(&params.error->code, code);
}

__global__ void __launch_bounds__(32) wait_kernel(WaitParams params) {
  if (threadIdx.x != 0) return;
  const std::uint64_t begin = ptx::global_timer_ns();
  for (unsigned poll = 1;; ++poll) {
    const std::uint32_t seen = ptx::ld_acquire_gpu(params.counter);
    if (seen >= params.target) break;
    if (poll % kPollsPerCheck == 0) {
      if (params.abort != nullptr && ptx::ld_acquire_sys(params.abort) != 0) return record(params, 2, seen);
      if (ptx::global_timer_ns() - begin > params.timeout_ns) return record(params, 1, seen);
    }
    __nanosleep(kPollIntervalNs);
  }
  ptx::st_relaxed_gpu(params.counter, 0);
}

__global__ void __launch_bounds__(32) write_kernel(std::uint32_t* address, std::uint32_t value) {
  ptx::st_release_sys(address, value);
}

}  // namespace

void launch_write_kernel(std::uint32_t* address, std::uint32_t value, cudaStream_t stream) {
  write_kernel<<<1, 1, 0, stream>>>(address, value);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void launch_wait_kernel(const WaitParams& params, cudaStream_t stream) {
  if (params.target == 0) return;
  wait_kernel<<<1, 1, 0, stream>>>(params);
  FLASHOVERLAP_CUDA_CHECK(cudaGetLastError());
}

void load_wait_kernel() {
  cudaFuncAttributes attributes;
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, wait_kernel));
  FLASHOVERLAP_CUDA_CHECK(cudaFuncGetAttributes(&attributes, write_kernel));
}

}  // namespace flashoverlap::cuda

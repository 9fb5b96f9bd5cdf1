// Holding a stream until a group of tiles is complete.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashoverlap::cuda {

/// Written by a wait kernel that gives up; lies in host memory that the device can write
/// (cudaHostAllocMapped) or in device memory. `code` is written last, with release order at system scope.
/// Reset by the host, to zero, between calls.
struct WaitError {
  std::uint32_t code = 0;      ///< 0: none; 1: time-out; 2: aborted; 3, 4: the same at a gate
  std::uint32_t group = 0;     ///< At a gate: the arrival that was waited for, from 0.
  std::uint32_t seen = 0;      ///< value of the counter
  std::uint32_t expected = 0;  ///< target
};

/// How a stream waits for a group.
///
/// Protocol of a counter: the signal GEMM's store warps add to it (red.release.gpu, signals_per_tile times
/// for each tile of the group); exactly one waiter per launch waits until it has reached tiles *
/// signals_per_tile (ld.acquire.gpu, or a stream memory operation) and then sets it to zero. The next launch
/// of the GEMM must come after the waiter in stream order, so it finds zeros: no host round trip, also when a
/// CUDA graph is replayed. After a time-out or an abort the counters are undefined and must be cleared by the
/// host.
struct WaitParams {
  std::uint32_t* counter = nullptr;  ///< in device memory, 4-byte aligned
  std::uint32_t target = 0;          ///< 0: no wait
  std::uint32_t group = 0;           ///< for the error record
  WaitError* error = nullptr;        ///< device-accessible address; may be null
  const std::uint32_t* abort =
      nullptr;  ///< device-accessible; a value other than 0 ends the wait; may be null
  std::uint64_t timeout_ns = 60'000'000'000;
};

/// Enqueues a kernel of one thread that waits as described. It takes a place on an SM for as long as it
/// waits: at least one SM must not be filled by the GEMM, or the GEMM's blocks must leave room for one more
/// warp. Throws Error(kDevice).
void launch_wait_kernel(const WaitParams& params, cudaStream_t stream);

/// Enqueues a stream memory operation that waits, and one that resets the counter. Takes no SM, knows no
/// time-out. The counter must lie in memory from cudaMalloc (CounterTable), not from a stream-ordered pool.
/// Throws Error(kUnsupported) where the driver has no such operation, Error(kDevice).
void enqueue_wait_value(std::uint32_t* counter, std::uint32_t target, cudaStream_t stream);

/// Enqueues the writing of `value` to `address`, released at system scope, by a kernel of one thread. Throws
/// Error(kDevice).
void launch_write_kernel(std::uint32_t* address, std::uint32_t value, cudaStream_t stream);

/// The same by a stream memory operation, which takes no SM. `address` as for enqueue_wait_value. Throws
/// Error(kUnsupported), Error(kDevice).
void enqueue_write_value(std::uint32_t* address, std::uint32_t value, cudaStream_t stream);

/// Loads the kernels that wait and write on the current device.
void load_wait_kernel();

}  // namespace flashoverlap::cuda

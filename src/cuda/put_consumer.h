// The consumer (arXiv 2607.19539, section 3.3): a kernel on SMs of its own that puts what the GEMM beside it
// has finished into the memory of the ranks that own it; and how an owner waits for what others put.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "peer_kernels.h"
#include "put_table.h"
#include "wait.h"

namespace flashoverlap::cuda {

/// Codes of a WaitError of those that wait here, beside those of wait.h. kSegment*: `group` is the segment
/// (group of the plan) that was not complete. kPuts*: `group` is the rank whose puts did not come.
enum PutWaitCode : std::uint32_t {
  kSegmentTimeout = 5,
  kSegmentAborted = 6,
  kPutsTimeout = 7,
  kPutsAborted = 8,
};

/// Nanoseconds of the device's clock; in host memory that the device writes.
struct ConsumerTimes {
  std::uint64_t begin_ns = 0;         ///< When the GEMM may begin.
  std::uint64_t producer_end_ns = 0;  ///< When it has ended.
  std::uint64_t end_ns = 0;           ///< When the last put was there.
  std::uint64_t idle_ns = 0;          ///< How long block 0 waited for segments.
};

struct ConsumerParams {
  const PutWork* puts = nullptr;  ///< [num_puts], in device memory
  std::int32_t num_puts = 0;
  const char* packed = nullptr;
  /// Of the groups of the GEMM (see WaitParams), which adds to them; cleared behind the consumer in the
  /// caller's stream. Null: everything is there.
  const std::uint32_t* counters = nullptr;
  std::uint32_t signals_per_tile = 1;  ///< What a tile adds to its group's counter.
  /// [num_puts], in device memory: blocks that have done their part of a put. Added to by all blocks
  /// (acquire and release at gpu scope), set back to 0 by the last one.
  std::uint32_t* done = nullptr;
  /// By rank: its receive buffer, and there the word that counts this rank's puts to it. Written by the block
  /// that ends a put (release at system scope); waited for by wait_for_puts_kernel; never set back: `before`
  /// is its value at the beginning of the call.
  char* received[kMaxPeerRanks] = {};
  std::uint32_t* count[kMaxPeerRanks] = {};
  std::uint32_t before[kMaxPeerRanks] = {};
  ConsumerTimes* times = nullptr;  ///< May be null.
  WaitError* error = nullptr;
  const std::uint32_t* abort = nullptr;
  std::uint64_t timeout_ns = 60'000'000'000;
};

/// Enqueues a kernel of one warp that waits until the first put can begin. Behind it the consumer finds the
/// GEMM on its SMs, and takes those that are left, whichever the hardware had given it first.
void launch_wait_for_first_segment(const ConsumerParams& params, cudaStream_t stream);

/// Blocks of consumers that fit on an SM which has nothing else to do.
constexpr int kConsumersPerSm = 2;

/// Enqueues the consumer on `num_blocks` blocks. All share each put; none waits for another. But a put is
/// there only when all have done their part, so they should have room to run at a time.
void launch_consumer(const ConsumerParams& params, int num_blocks, cudaStream_t stream);

struct WaitForPutsParams {
  const std::uint32_t* counts = nullptr;  ///< This rank's words, `stride` apart.
  std::int32_t stride = 1;
  std::int32_t num_ranks = 0;
  std::uint32_t expected[kMaxPeerRanks] = {};  ///< Value of each word once all of this call are there.
  std::uint32_t puts[kMaxPeerRanks] = {};      ///< Of these in this call, for the error.
  WaitError* error = nullptr;
  const std::uint32_t* abort = nullptr;
  std::uint64_t timeout_ns = 60'000'000'000;
};

/// Enqueues a kernel of one warp that waits (acquire at system scope) until everything that other ranks put
/// in this call is there.
void launch_wait_for_puts(const WaitForPutsParams& params, cudaStream_t stream);

/// Loads all of them on the current device.
void load_put_kernels();

}  // namespace flashoverlap::cuda

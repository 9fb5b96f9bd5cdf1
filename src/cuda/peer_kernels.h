// Kernels that move and sum data between ranks whose memory this device can address.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flashoverlap/dtype.h"

namespace flashoverlap::cuda {

/// Ranks of a peer group; the pointers travel as kernel parameters.
constexpr int kMaxPeerRanks = 16;

/// to[j][i] = sum over r of from[r][i], in float32 in the order of r, for i < count and every j.
struct PeerReduceParams {
  const void* from[kMaxPeerRanks] = {};
  void* to[kMaxPeerRanks] =
      {};  ///< May be the same memory as any `from`: an element is read by the thread that writes it.
  int num_from = 0;
  int num_to = 0;
  std::int64_t count = 0;
};

/// to[j][i] = from[j][i] for i < count[j].
struct PeerCopyParams {
  const void* from[kMaxPeerRanks] = {};
  void* to[kMaxPeerRanks] = {};
  std::int64_t count[kMaxPeerRanks] = {};
  int num_copies = 0;
};

/// Enqueue one kernel of `max_ctas` blocks at most. 16-byte accesses where all addresses allow it.
void launch_peer_reduce(const PeerReduceParams& params, DType dtype, int max_ctas, cudaStream_t stream);
void launch_peer_copy(const PeerCopyParams& params, DType dtype, int max_ctas, cudaStream_t stream);

/// Notes the device's time in `*begin_ns`; holds the stream until `duration_ns` after that, and notes when
/// that was: there the link takes up what comes next, if it waits already.
void launch_pace_begin(std::uint64_t* begin_ns, cudaStream_t stream);
void launch_pace_end(std::uint64_t* begin_ns, std::uint64_t duration_ns, cudaStream_t stream);

/// Loads all of them on the current device.
void load_peer_kernels();

}  // namespace flashoverlap::cuda

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "flashoverlap/communicator.h"

namespace flashoverlap {

/// A link as every rank of an in-process group has it, to study overlap for links that are not there.
///
/// A call occupies each rank's link for (bytes that the rank must put on the wire) / bandwidth and completes
/// `latency` after that, never before its real copy is done. Bytes on the wire per rank, with W ranks and S
/// bytes in the whole buffer: all-reduce 2 (W-1)/W S; reduce-scatter and all-gather (W-1)/W S; all-to-all the
/// larger of what it sends to and receives from others; send and receive their own bytes. (nccl-tests,
/// PERFORMANCE.md: "bus bandwidth".) Waiting sleeps: it burns no core.
///
/// In detail: the last rank's arrival makes a call ready. A link has two directions; each carries the bytes
/// of one call after the other, so that calls of several streams share it: end = max(ready, end of the call
/// before) + bytes / bandwidth, per rank and direction (collectives but all-to-all put their bytes on both).
/// The call completes at the last end + latency: over all ranks; for an all-to-all's rank over itself, the
/// ranks that it sends to (their receiving end) and those that it receives from (their sending end). Without
/// bytes on the wire: ready + latency. Subgroups use their ranks' links. `exchange` and `subgroup` are not
/// paced.
struct LinkModel {
  double bandwidth_gbps = 0;  ///< 1e9 bytes a second per rank and direction; 0: not paced.
  double latency_us = 0;
};

/// How the ranks of an in-process group deal with each other.
struct InProcessOptions {
  LinkModel link;
  /// How long a call waits for other ranks; at least 1 ms. At this default, the environment variable
  /// FLASHOVERLAP_TIMEOUT_MS (an integer from 1) takes its place where it is set.
  std::chrono::milliseconds timeout{60'000};
};

/// Communicators for ranks that are threads of this process; one per rank, for use from one thread each.
/// Throws Error(kBadArgument) for world_size < 1, a negative or non-finite link, a time-out below 1 ms, or a
/// value of FLASHOVERLAP_TIMEOUT_MS that is not understood.
///
/// - Results are bitwise repeatable: sums are taken in rank order in float32 and rounded once, however data
/// is cut into calls.
/// - Calls are matched in the order in which they are issued (not in which streams reach them), so one group
/// may use several
///   streams. Collectives of different kinds, counts or types, and counts that disagree, throw on every rank,
///   naming both.
/// - send waits for its receive: exchange data of two ranks on two streams, or in the order send-receive,
/// receive-send.
/// - Every rank throws the same error, which tells the first cause. Ranks in messages are those of the whole
/// world. Besides
///   time-outs it can be that a rank aborted, that run_ranks saw it return, or that its stream dropped the
///   call.
/// - A world and its subgroups share one fate: an error or abort in one ends all, since a rank that is dead
/// is dead for all.
/// - Send and receive buffers that overlap other than in place as communicator.h allows, null or misaligned
/// buffers, negative
///   counts, a wrong number of counts, a peer out of range, a stream that is not a HostStream:
///   Error(kBadArgument) at the call, which then counts as not made.
std::vector<std::shared_ptr<Communicator>> make_in_process_communicators(
    int world_size, const InProcessOptions& options = {});

/// Calls function(communicator of rank r) on one thread per rank and waits for all. When a rank throws, the
/// others are aborted; then the first rank's own error is thrown here, with the rank in front of its message
/// (an exception that is not an Error becomes Error(kCommunication), std::bad_alloc Error(kOutOfMemory)).
/// When a rank returns while another one waits for a call that it never made, that one fails at once, naming
/// it.
void run_ranks(int world_size, const InProcessOptions& options,
               const std::function<void(std::shared_ptr<Communicator>)>& function);

}  // namespace flashoverlap

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "flashoverlap/communicator.h"

namespace flashoverlap {

/// A link as every rank of an in-process group has it, to study overlap for links that are not there.
///
/// A call occupies each rank's link for (bytes that the rank must put on the wire) / bandwidth and completes `latency` after
/// that, never before its real copy is done. Bytes on the wire per rank, with W ranks and S bytes in the whole buffer:
/// all-reduce 2 (W-1)/W S; reduce-scatter and all-gather (W-1)/W S; all-to-all the larger of what it sends to and receives
/// from others; send and receive their own bytes. (nccl-tests, PERFORMANCE.md: "bus bandwidth".) Waiting sleeps: it burns no core.
struct LinkModel {
  double bandwidth_gbps = 0;  ///< 1e9 bytes a second per rank and direction; 0: not paced.
  double latency_us = 0;
};

/// Communicators for ranks that are threads of this process. Results are bitwise repeatable: sums in rank order in float32.
struct InProcessOptions {
  LinkModel link;
  std::chrono::milliseconds timeout{60'000};
};

/// One communicator per rank, for use from one thread each. Throws Error(kBadArgument) for world_size < 1 or a negative or
/// non-finite link.
std::vector<std::shared_ptr<Communicator>> make_in_process_communicators(int world_size, const InProcessOptions& options = {});

/// Calls function(communicator of rank r) on one thread per rank and waits for all. When a rank throws, the others are
/// aborted; then the first rank's own error is thrown here, with the rank in front of its message.
void run_ranks(int world_size, const InProcessOptions& options, const std::function<void(std::shared_ptr<Communicator>)>& function);

}  // namespace flashoverlap

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>

#include "comm/call.h"

namespace flashoverlap::comm::mpi {

/// A call that a stream of this rank is in, as others may look at it: the thread that makes it writes, the
/// service thread and reports read.
struct Pending {
  struct Peer {
    int world_rank = 0;
    std::atomic<bool> has_arrived{false};  ///< Its call has come (send: does not come, so never).
    std::atomic<std::int64_t> segments_received{0};
    std::atomic<std::int64_t> segments_sent{0};
    std::int64_t segments_to_receive = 0;  ///< Set before the call is shown to others.
    std::int64_t segments_to_send = 0;
  };
  std::shared_ptr<const Call> call;
  std::chrono::steady_clock::time_point since;
  std::deque<Peer> peers;
};

}  // namespace flashoverlap::comm::mpi

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/call.h"
#include "comm/mpi/flow.h"
#include "comm/mpi/staging.h"

namespace flashoverlap::comm::mpi {

/// This rank's place in the group of a call, and the tags of its data.
struct Place {
  int rank = 0;
  int size = 1;
  int scatter_tag = 0;  ///< Data that goes to its receiver directly, or to whoever sums it.
  int gather_tag = 0;   ///< Sums that go to everybody.
};

/// How the data of one call moves: flows that set off one another. Complete once no message is in flight.
///
/// All data goes from its sender to its receiver directly. A reduction sends each chunk of the terms to the
/// rank that owns the chunk; the owner adds them up in rank order in float32 (the same sum, bit for bit, as
/// the in-process communicator's), and for an all-reduce sends the sum to everybody. Bytes on the wire are
/// those of a ring, in two steps instead of 2 (W-1), at the price of W-1 messages per step. An all-reduce of
/// at most kOneStepBytes goes to everybody at once, and every rank adds up for itself.
class Movement {
 public:
  virtual ~Movement() = default;
  virtual void start() = 0;
  /// After a failure: memory that MPI may still write into must not be used again.
  virtual void abandon_memory() {}
  /// All that this rank sends and receives, for reports.
  [[nodiscard]] virtual std::vector<const Flow*> flows() const = 0;
};

inline constexpr std::int64_t kOneStepBytes = 16 * 1024;

/// Null for calls without data. send and receive: `call.peer` is a world rank, so `peer` has the group's.
std::unique_ptr<Movement> make_movement(const Call& call, const Place& place, int peer, Requests& requests,
                                        StagingPool& staging);

}  // namespace flashoverlap::comm::mpi

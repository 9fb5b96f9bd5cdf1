#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "flashoverlap/communicator.h"

namespace flashoverlap {

/// Lets ranks write into each other's memory, and tell each other that they have. One object per rank, from
/// `Communicator::symmetric_heap`.
///
/// A rank opens its memory to the others for one run of a plan at a time: the n-th window of one rank belongs
/// to the n-th of each other. A put waits until the peer has opened its window of the same number, so memory
/// is never written before its owner has given it away, and needs no second copy: buffers of consecutive
/// windows may be the same.
///
/// Whatever cannot come any more, because a rank failed, or did not open its window or put what it owes
/// within the communicator's time-out, makes every rank's stream throw, as with the communicator's own calls.
class SymmetricHeap {
 public:
  /// Memory that peers may write, and what they call once they have.
  struct Window {
    struct Buffer {
      std::byte* data = nullptr;
      std::int64_t bytes = 0;
    };
    std::vector<Buffer> buffers;
    /// Puts that will come from each rank, this one included; one number for each rank.
    std::vector<std::int64_t> arrivals_from;
    /// Called for each put that has come, on the thread that brought it; what it wrote is visible. Must not
    /// block or throw.
    std::function<void(std::int64_t slice)> on_arrival;
  };

  virtual ~SymmetricHeap() = default;

  /// Opens this rank's next window. It must be closed before the next is opened.
  virtual void open(Window window) = 0;

  /// Puts into `stream`: copies `bytes` from `from` to `offset_bytes` of the peer's `buffer`, then the peer's
  /// on_arrival(slice). `from` must stay untouched until the stream has passed this. Throws
  /// Error(kBadArgument) for a peer out of range or without a window open here.
  virtual void put(int peer, std::int64_t buffer, std::int64_t offset_bytes, const void* from,
                   std::int64_t bytes, std::int64_t slice, Stream& stream, const TransferLabel& label) = 0;

  /// The stream goes on once all puts to this rank's window have come.
  virtual void await_arrivals(Stream& stream, const TransferLabel& label) = 0;

  /// Ends the window; nobody writes into it after that. Waits for a copy in progress.
  virtual void close() noexcept = 0;
};

}  // namespace flashoverlap

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/dtype.h"
#include "flashoverlap/error.h"

namespace flashoverlap {

/// An in-order queue of asynchronous work. `HostStream` (host_stream.h) runs it on a thread; a CUDA stream on
/// a GPU.
class Stream {
 public:
  virtual ~Stream() = default;
  /// Waits until all work that was put in so far is done. Throws the first error that any of it met.
  virtual void synchronize() = 0;
};

class SymmetricHeap;

/// Says in an error message what a communication call was for. Views must outlive the call's completion.
struct TransferLabel {
  std::string_view operation = {};  ///< For example "gemm-all-reduce m=4096 n=4096 k=1024".
  std::int64_t group = -1;          ///< Wave group or slice that set it off; -1: none.
  std::int64_t transfer = -1;       ///< Index in the plan; -1: none.
  std::int64_t slice = -1;          ///< Slice of the plan that the call brings; -1: none.
};

/// Talks to the other ranks of one group. One object per rank.
///
/// Calls are asynchronous: they are put into `stream` and return. All ranks must make the same calls in the
/// same order (send and receive: matching calls per pair of ranks), as with NCCL and MPI. Counts are in
/// elements, any count may be 0, buffers must stay untouched until the stream has passed the call. Sums are
/// accumulated in float32 in rank order 0, 1, …, so results are bitwise repeatable and do not depend on how
/// data is cut into calls, where the provider says so.
///
/// A call that cannot finish because a rank failed, made another call, or did not arrive within the time-out
/// makes every rank's stream throw Error(kCommunication or kTimeout), naming the rank that was waited for and
/// the label of both sides. After that, or after `abort`, every further call throws: make a new communicator.
class Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  /// "in-process", "mpi", "nccl", …
  [[nodiscard]] virtual std::string_view name() const = 0;

  /// A stream of the kind that this communicator's calls take.
  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream(const std::string& name) = 0;

  /// receive[i] = sum over ranks of send[i]. In place when send == receive.
  virtual void all_reduce(const void* send, void* receive, std::int64_t count, DType dtype, Stream& stream,
                          const TransferLabel& label) = 0;

  /// Rank r receives the sum of everybody's chunk r. `counts` has one entry per rank, equal on all ranks;
  /// `send` holds the chunks one after the other. In place when receive is this rank's chunk of send.
  virtual void reduce_scatter(const void* send, void* receive, std::span<const std::int64_t> counts,
                              DType dtype, Stream& stream, const TransferLabel& label) = 0;

  /// Everybody receives rank r's counts[r] elements as chunk r. In place when send is this rank's chunk of
  /// receive.
  virtual void all_gather(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                          Stream& stream, const TransferLabel& label) = 0;

  /// Sends chunk d of `send` to rank d and receives rank s's chunk at s of `receive`; chunks lie one after
  /// the other. send_counts[d] here must equal receive_counts[here] on rank d. Not in place.
  virtual void all_to_all(const void* send, std::span<const std::int64_t> send_counts, void* receive,
                          std::span<const std::int64_t> receive_counts, DType dtype, Stream& stream,
                          const TransferLabel& label) = 0;

  virtual void send(const void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
                    const TransferLabel& label) = 0;
  virtual void receive(void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
                       const TransferLabel& label) = 0;

  /// The stream goes on once all ranks' streams have come here.
  virtual void barrier(Stream& stream, const TransferLabel& label) = 0;

  /// Blocking exchange of a few bytes, outside any stream: everybody receives rank r's value as element r.
  /// For agreement on plans and for rendezvous; not for speed.
  virtual std::vector<std::uint64_t> exchange(std::uint64_t value, const TransferLabel& label) = 0;

  /// Blocking exchange of byte strings of any length, outside any stream.
  virtual std::vector<std::string> exchange(const std::string& bytes, const TransferLabel& label) = 0;

  /// A communicator of the listed ranks (of this communicator), which get ranks 0, 1, … in the order listed.
  /// Every listed rank must call it, with the same list; other ranks need not.
  [[nodiscard]] virtual std::shared_ptr<Communicator> subgroup(std::span<const int> ranks) = 0;

  /// Memory of the ranks that they can write into directly, see symmetric_heap.h; null where the provider has
  /// none. Lives as long as this communicator.
  [[nodiscard]] virtual SymmetricHeap* symmetric_heap() { return nullptr; }

  /// Makes every rank's pending and future calls throw Error(kCommunication) with this rank and reason. Never
  /// throws, may be called from any thread and repeatedly; the first reason stays.
  virtual void abort(const std::string& reason) noexcept = 0;

  /// How long a call may wait for other ranks. Default 60 s.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const = 0;
};

}  // namespace flashoverlap

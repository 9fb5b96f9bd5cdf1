// What the executor can ask of a communicator between ranks that read each other's memory, besides
// collectives.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "device.h"
#include "flashoverlap/communicator.h"
#include "flashoverlap/in_process.h"

namespace flashoverlap::cuda {

/// `count` elements at `data` that go to `peer`, or come from there.
struct PeerMessage {
  int peer = 0;
  void* data = nullptr;
  std::int64_t count = 0;
  /// Of a send: what has to come before its data is there; null: nothing. Between ranks of one process only.
  const Event* ready = nullptr;
};

/// Called while an exchange is put into the stream.
struct MessageHooks {
  /// Before the copy for receives[i], behind all that it waits for.
  std::function<void(std::size_t)> begins;
  std::function<void(std::size_t)> arrived;  ///< Behind it.
};

/// Two pieces of memory of one rank.
struct PeerMemory {
  void* first = nullptr;
  void* second = nullptr;
};

class PeerReader {
 public:
  PeerReader() = default;
  PeerReader(const PeerReader&) = delete;
  PeerReader& operator=(const PeerReader&) = delete;
  virtual ~PeerReader() = default;

  /// Whether all-gathers, all-to-alls and `read_peers` need no SM, on any rank.
  [[nodiscard]] virtual bool copies_without_sms() const = 0;

  /// Whether the ranks are threads of one process.
  [[nodiscard]] virtual bool is_one_process() const = 0;

  /// What memory the other ranks can read, of what they are given to read.
  [[nodiscard]] virtual DeviceMemory readable_memory() const = 0;

  /// Tells the other ranks of memory that they will read in calls to come: what has to be opened first is
  /// opened now. Collective, on the host alone. For calls that a GEMM is waiting for already, since opening
  /// may wait for what runs on the device.
  virtual void introduce(const void* memory, const TransferLabel& label) = 0;

  /// Tells the other ranks of memory that they will write to in calls to come, and returns theirs, by rank,
  /// as this process addresses it: for threads as long as it is there, for processes until the next such
  /// call. Collective, on the host alone.
  virtual std::vector<PeerMemory> share_memory(const PeerMemory& memory, const TransferLabel& label) = 0;

  /// What messages and puts to other ranks are paced to.
  [[nodiscard]] virtual LinkModel link() const = 0;

  /// to[r] = elements [begin, begin + count) of the `size` elements that rank r passes as `send`, for every
  /// other rank r. A collective: `size` is the same on all ranks, what each of them reads is its own affair.
  virtual void read_peers(const void* send, std::int64_t size, std::int64_t begin, std::int64_t count,
                          std::span<void* const> to, DType dtype, Stream& stream,
                          const TransferLabel& label) = 0;

  /// Sends and receives, all in one meeting of the ranks: the i-th receive from a rank takes what that rank's
  /// i-th send to this one has. Copies are in the order of `receives`; each waits for what is `ready` of it,
  /// so that all ranks must have their messages in an order in which none waits for a later one.
  virtual void exchange_messages(std::span<const PeerMessage> sends, std::span<const PeerMessage> receives,
                                 DType dtype, Stream& stream, const TransferLabel& label,
                                 const MessageHooks& hooks) = 0;
};

}  // namespace flashoverlap::cuda

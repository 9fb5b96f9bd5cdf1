// The host side of the local GPU communicator: where the ranks of one process meet to make a call.
#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "device.h"
#include "flashoverlap/communicator.h"
#include "peer_reader.h"
#include "watchdog.h"

namespace flashoverlap::cuda {

/// What one rank passes to one collective.
struct LocalCall {
  std::string_view kind;
  const void* send = nullptr;
  void* receive = nullptr;
  std::vector<std::int64_t> send_counts;     ///< Per rank; all-reduce: one entry.
  std::vector<std::int64_t> receive_counts;  ///< All-to-all only.
  DType dtype = DType::kFloat32;
  TransferLabel label;
  std::vector<PeerMessage> sends = {};     ///< Of an exchange of messages.
  std::vector<PeerMessage> receives = {};  ///< The same.
};

/// The counts of the messages to or from `peer`, in order.
std::vector<std::int64_t> counts_with(const std::vector<PeerMessage>& messages, int peer);

/// Shared by the ranks of one group. A collective meets twice: once when every rank's call and its `ready`
/// event are there, once when every rank's work is in its stream and its `done` event recorded. Two meetings
/// a call are enough for the events to be used again: nobody records `ready` for the next call before
/// everybody waits for this one's, and likewise `done`.
class LocalGroup {
 public:
  LocalGroup(std::vector<int> devices, std::chrono::milliseconds timeout);

  [[nodiscard]] int size() const { return static_cast<int>(devices_.size()); }
  [[nodiscard]] const std::vector<int>& devices() const { return devices_; }
  [[nodiscard]] const std::shared_ptr<FailureBoard>& board() const { return board_; }

  /// Publishes this rank's call and waits on the host for all others'. Throws Error(kTimeout) naming the
  /// ranks that did not come, Error(kCommunication) when a rank failed or the calls do not match; then on
  /// every rank.
  const std::vector<LocalCall>& meet(int rank, LocalCall call);
  /// The second meeting of the same call.
  void meet_again(int rank);

  [[nodiscard]] const Event& ready(int rank) const { return ready_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] const Event& done(int rank) const { return done_[static_cast<std::size_t>(rank)]; }

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_ = timeout.count(); }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_ms_); }
  void throw_if_failed() const;

 private:
  void wait_for_all(int rank);
  void fail_for_missing(int rank);
  void check_match() const;
  void check_messages(int from, int to) const;

  const std::vector<int> devices_;
  std::atomic<std::int64_t> timeout_ms_;
  const std::shared_ptr<FailureBoard> board_ = std::make_shared<FailureBoard>();
  std::vector<LocalCall> calls_;
  std::vector<Event> ready_;
  std::vector<Event> done_;
  std::vector<std::atomic<std::uint64_t>>
      arrivals_;  ///< Per rank: meetings that it has come to. Release; read with acquire.
};

}  // namespace flashoverlap::cuda

// The host side of communicators whose ranks read each other's memory: where they meet to make a call.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "device.h"
#include "peer_call.h"
#include "watchdog.h"

namespace flashoverlap::cuda {

/// One rank's membership. A collective meets twice: once when every rank's call and its `ready` event are
/// there, once when every rank's work is in its stream and its `done` event recorded. Two meetings a call are
/// enough for the events to be used again: nobody records `ready` for the next call before everybody waits
/// for this one's, and likewise `done`.
class PeerGroup {
 public:
  PeerGroup() = default;
  PeerGroup(const PeerGroup&) = delete;
  PeerGroup& operator=(const PeerGroup&) = delete;
  virtual ~PeerGroup() = default;

  [[nodiscard]] virtual int size() const = 0;
  /// Whether the others are processes of their own, which can reach only memory from cudaMalloc
  /// (DeviceMemory::kShareable).
  [[nodiscard]] virtual bool has_processes() const = 0;

  /// Publishes this rank's call and waits on the host for all others'. In what it returns, what others pass
  /// has addresses of this process. Throws Error(kTimeout) naming the ranks that did not come,
  /// Error(kCommunication) when a rank failed or the calls do not match; then on every rank.
  virtual const std::vector<PeerCall>& meet(PeerCall call) = 0;
  /// The second meeting of the same call.
  virtual void meet_again() = 0;

  [[nodiscard]] virtual const Event& ready(int rank) const = 0;
  [[nodiscard]] virtual const Event& done(int rank) const = 0;

  /// Every rank's next look throws it; the first failure stays.
  virtual void fail(const Failure& failure) noexcept = 0;
  virtual void throw_if_failed() = 0;
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const = 0;

  /// The group of these of its ranks, who all call it; `control` brings them together.
  [[nodiscard]] virtual std::shared_ptr<PeerGroup> subgroup(Communicator& control,
                                                            std::span<const int> ranks) = 0;
};

}  // namespace flashoverlap::cuda

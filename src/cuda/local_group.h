// Peer groups of threads of one process.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "peer_group.h"

namespace flashoverlap::cuda {

/// What the ranks of such a group share: rank r is on devices[r].
class LocalGroup {
 public:
  LocalGroup(std::vector<int> devices, std::chrono::milliseconds timeout);

 private:
  friend class LocalMember;

  const std::vector<int> devices_;
  std::atomic<std::int64_t> timeout_ms_;
  FailureBoard board_;
  std::vector<PeerCall> calls_;
  std::vector<Event> ready_;
  std::vector<Event> done_;
  std::vector<std::atomic<std::uint64_t>>
      arrivals_;  ///< Per rank: meetings that it has come to. Release; read with acquire.
};

class LocalMember final : public PeerGroup {
 public:
  /// Lets the rank's device address the memory of the others'. Error(kUnsupported) where it cannot.
  LocalMember(std::shared_ptr<LocalGroup> group, int rank);

  [[nodiscard]] int size() const override { return static_cast<int>(group_->devices_.size()); }
  [[nodiscard]] bool has_processes() const override { return false; }
  const std::vector<PeerCall>& meet(PeerCall call) override;
  void meet_again() override { wait_for_all(); }
  [[nodiscard]] const Event& ready(int rank) const override;
  [[nodiscard]] const Event& done(int rank) const override;
  void fail(const Failure& failure) noexcept override;
  void throw_if_failed() override;
  void set_timeout(std::chrono::milliseconds timeout) override { group_->timeout_ms_ = timeout.count(); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override {
    return std::chrono::milliseconds(group_->timeout_ms_);
  }
  [[nodiscard]] std::shared_ptr<PeerGroup> subgroup(Communicator& control,
                                                    std::span<const int> ranks) override;

 private:
  void enable_peers() const;
  void wait_for_all();
  void fail_for_missing();

  std::shared_ptr<LocalGroup> group_;
  int rank_;
};

}  // namespace flashoverlap::cuda

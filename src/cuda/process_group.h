// Peer groups of processes of one host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/shared_meeting.h"
#include "ipc_memory.h"
#include "peer_group.h"

namespace flashoverlap::cuda {

/// One rank. Calls travel through memory of the host that the processes share, addresses and events by CUDA
/// IPC.
class ProcessGroup final : public PeerGroup {
 public:
  /// Collective over `control`. Error(kUnsupported) on every rank when they are on several hosts, in one
  /// process, or a device cannot address another's memory.
  ProcessGroup(Communicator& control, int device, std::chrono::milliseconds timeout);
  ~ProcessGroup() override;

  [[nodiscard]] int size() const override { return meeting_.size(); }
  [[nodiscard]] bool has_processes() const override { return true; }
  const std::vector<PeerCall>& meet(PeerCall call) override;
  void meet_again() override;
  [[nodiscard]] const Event& ready(int rank) const override;
  [[nodiscard]] const Event& done(int rank) const override;
  void fail(const Failure& failure) noexcept override { meeting_.fail(failure.kind, failure.reason); }
  void throw_if_failed() override { meeting_.throw_if_failed(); }
  void set_timeout(std::chrono::milliseconds timeout) override { meeting_.set_timeout(timeout); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return meeting_.timeout(); }
  [[nodiscard]] std::shared_ptr<PeerGroup> subgroup(Communicator& control,
                                                    std::span<const int> ranks) override;

 private:
  struct SharedCall;
  struct Texts {
    std::string kind, operation;
  };

  void share_events(Communicator& control);
  void try_memory(Communicator& control);
  void write(const PeerCall& call);
  [[nodiscard]] PeerCall read(int rank);
  void read_others();
  [[nodiscard]] SharedCall& slot(int rank) const;

  const int device_;
  comm::SharedMeeting meeting_;
  IpcMemory memory_;
  std::vector<Event> ready_, done_;  // by rank
  std::vector<PeerCall> calls_;
  std::vector<Texts> texts_;  // that the calls of the other ranks refer to
  DeviceBuffer probe_;
};

}  // namespace flashoverlap::cuda

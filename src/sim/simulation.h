#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "flashoverlap/simulator.h"
#include "sim/compute_model.h"
#include "sim/event_queue.h"
#include "sim/network.h"
#include "sim/rank_compute.h"
#include "sim/work_clock.h"

/// One run of the simulator.
namespace flashoverlap::sim {

/// How far one transfer of one rank has come.
struct TransferState {
  bool triggered = false;
  bool issued = false;
  bool done = false;
  double triggered_us = -1;
  double issued_us = -1;
  double begin_us = -1;
  double end_us = -1;
  std::int32_t last_rank = -1;  ///< The rank that came last and so let it begin; -1: nobody was waited for.
};

/// Transfers of one rank with the same channel number: they start one after the other.
struct Channel {
  std::vector<std::int64_t> transfers;
  std::size_t head = 0;
  std::int64_t collectives_issued = 0;
};

struct RankState {
  const OverlapPlan* plan = nullptr;
  std::unique_ptr<RankCompute> compute;
  WorkClock clock;
  std::uint32_t compute_version = 0;
  std::vector<TransferState> transfers;
  std::map<std::int32_t, Channel> channels;
  /// (group or slice, transfer that it sets off), sorted.
  std::vector<std::pair<std::int64_t, std::int64_t>> group_triggers;
  std::vector<std::pair<std::int64_t, std::int64_t>> slice_triggers;
  std::vector<double> group_done_us;  ///< -1: not yet.
  std::vector<std::int64_t>
      slice_from_rank;  ///< Who made the slice arrive, and with which of its transfers; -1: not yet.
  std::vector<std::int64_t> slice_from_transfer;
  double last_tile_us = 0;
  double alone_us = 0;
  std::int64_t transfers_left = 0;
  int flows = 0;
  double stolen_rate = 0;  ///< Sum over flows of computing time that each takes per time.
  double communicating_since_us = 0;
  RankSimulation result;
};

/// One transfer in flight and the rank's calls that it consists of.
struct FlowMembers {
  TransferKind kind = TransferKind::kAllReduce;
  double stolen_rate = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> calls;  ///< (rank, transfer)
};

class Simulation {
 public:
  Simulation(std::span<const OverlapPlan* const> plans, const MachineProfile& machine,
             const SimulationOptions& options);
  SimulationResult run();

 private:
  void make_rank(std::int64_t rank, std::map<const OverlapPlan*, std::shared_ptr<const GroupEnds>>& shared);
  void schedule_compute(RankState& rank, std::int64_t number);
  void compute_event(std::int64_t number, double now_us);
  void group_done(std::int64_t number, std::int64_t group, double now_us);
  void triggered(std::int64_t number, std::int64_t transfer, double now_us);
  void issue_head(std::int64_t number, std::int32_t channel, double now_us);
  void issue(std::int64_t number, std::int64_t transfer, double now_us);
  void join_collective(std::int64_t number, std::int64_t transfer, double now_us);
  void join_message(std::int64_t number, std::int64_t transfer, double now_us);
  void begin_flow(FlowMembers members, std::int64_t bytes, std::int64_t from, std::int64_t to,
                  std::int32_t last_rank, double now_us);
  void flow_end(std::int64_t flow, double now_us);
  void call_done(std::int64_t number, std::int64_t transfer, double now_us);
  void slice_arrived(std::int64_t number, std::int64_t slice, std::int64_t from_rank,
                     std::int64_t from_transfer, double now_us);
  void set_off(const std::vector<std::pair<std::int64_t, std::int64_t>>& triggers, std::int64_t number,
               std::int64_t index, double time_us);
  void set_busy(std::int64_t number, int flows, double stolen_rate, double now_us);
  void push_ends(const std::vector<std::int64_t>& changed);
  void finish_ranks();
  void record_transfer(std::int64_t number, std::int64_t transfer);
  [[nodiscard]] bool in_timeline(std::int64_t number) const { return number < options_.timeline_ranks; }

  // deadlock.cpp
  void require_finished() const;
  [[nodiscard]] std::string stuck(std::int64_t number) const;
  // critical_path.cpp
  [[nodiscard]] std::vector<std::string> critical_path() const;

  std::span<const OverlapPlan* const> plans_;
  const MachineProfile& machine_;
  const SimulationOptions& options_;
  std::map<const OverlapPlan*, std::unique_ptr<ComputeModel>> models_;
  std::vector<RankState> ranks_;
  std::vector<Jitter> transfer_jitter_;
  Network network_;
  EventQueue events_;
  std::map<std::int64_t, FlowMembers> flows_;
  /// Collectives that some ranks have come to: (channel, how many before it on the channel).
  std::map<std::pair<std::int32_t, std::int64_t>, FlowMembers> meetings_;
  /// Sends and receives that wait for their other side: (channel, from, to, kind) to transfers in order.
  std::map<std::tuple<std::int32_t, std::int64_t, std::int64_t, TransferKind>, std::vector<std::int64_t>>
      waiting_messages_;
  Timeline timeline_;
};

/// "all-reduce of group 3", "send to rank 2".
std::string describe(const OverlapPlan& plan, std::int64_t transfer);

}  // namespace flashoverlap::sim

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "flashoverlap/machine_profile.h"
#include "sim/topology.h"

/// Transfers in flight and the ports that they share.
namespace flashoverlap::sim {

class Network {
 public:
  Network(const MachineProfile& machine, std::int64_t world_size);

  /// What a transfer takes when nothing shares its ports.
  [[nodiscard]] double collective_us(TransferKind kind, std::int64_t bytes, std::int64_t communication_units,
                                     DType dtype);
  [[nodiscard]] double message_us(TransferKind kind, std::int64_t bytes, std::int64_t from, std::int64_t to,
                                  std::int64_t communication_units, DType dtype);

  struct Flow {
    double end_us = 0;
    double rate = 1;  ///< Of what it would have alone.
    double since_us = 0;
    std::uint32_t version = 0;  ///< Counts changes of `end_us`: an older end event is void.
    std::vector<std::pair<std::size_t, double>>
        ports;  ///< Port, and the fraction of it that the flow takes alone.
  };

  /// Starts a flow that would take `alone_us` by itself; returns its number. `changed` gets all flows (this
  /// one too) that now end at another time.
  std::int64_t start_collective(TransferKind kind, std::int64_t bytes, double alone_us, double now_us,
                                std::vector<std::int64_t>& changed);
  std::int64_t start_message(std::int64_t bytes, std::int64_t from, std::int64_t to, double alone_us,
                             double now_us, std::vector<std::int64_t>& changed);
  void finish(std::int64_t flow, double now_us, std::vector<std::int64_t>& changed);
  [[nodiscard]] const Flow& flow(std::int64_t number) const { return flows_.at(number); }

 private:
  using CurveKey = std::pair<TransferKind, std::pair<std::int64_t, DType>>;
  const BandwidthCurve& curve(TransferKind kind, std::int64_t communication_units, DType dtype);
  [[nodiscard]] std::size_t port(std::size_t level, std::int64_t rank, bool outgoing) const;
  std::int64_t start(Flow flow, double alone_us, double now_us, std::vector<std::int64_t>& changed);
  /// Brings the rates of all flows that use one of `ports` up to date.
  void share(const std::vector<std::pair<std::size_t, double>>& ports, double now_us,
             std::vector<std::int64_t>& changed);

  const MachineProfile& machine_;
  std::int64_t world_size_;
  std::vector<LevelUse> uses_;  ///< Empty: the profile has curves only; each rank then has one port.
  std::vector<std::size_t> first_port_;
  std::vector<double> load_;                           ///< By port: sum of its flows' fractions.
  std::vector<std::vector<std::int64_t>> port_flows_;  ///< By port: the flows that use it, ascending.
  std::unordered_map<std::int64_t, Flow> flows_;
  std::map<CurveKey, BandwidthCurve> curves_;
  std::int64_t next_flow_ = 0;
};

}  // namespace flashoverlap::sim

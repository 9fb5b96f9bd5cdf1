#include "sim/network.h"

#include <algorithm>

namespace flashoverlap::sim {

Network::Network(const MachineProfile& machine, std::int64_t world_size)
    : machine_(machine), world_size_(world_size) {
  if (!machine.levels.empty() && world_size > 1) uses_ = level_uses(machine.levels, world_size, machine.name);
  if (uses_.empty()) uses_.push_back({.inner_ranks = 1, .fan_out = world_size, .ports = 1});
  std::size_t ports = 0;
  for (const LevelUse& use : uses_) {
    first_port_.push_back(ports);
    const std::int64_t domains = (world_size + use.inner_ranks - 1) / use.inner_ranks;
    ports += 2 * static_cast<std::size_t>(domains * use.ports);
  }
  load_.resize(ports, 0);
  port_flows_.resize(ports);
}

const BandwidthCurve& Network::curve(TransferKind kind, std::int64_t communication_units, DType dtype) {
  const CurveKey key{kind, {communication_units, dtype}};
  auto found = curves_.find(key);
  if (found == curves_.end()) {
    found = curves_.emplace(key, machine_.curve(kind, world_size_, communication_units, dtype)).first;
  }
  return found->second;
}

double Network::collective_us(TransferKind kind, std::int64_t bytes, std::int64_t communication_units,
                              DType dtype) {
  return curve(kind, communication_units, dtype).time_us(bytes);
}

double Network::message_us(TransferKind kind, std::int64_t bytes, std::int64_t from, std::int64_t to,
                           std::int64_t communication_units, DType dtype) {
  if (bytes == 0) return 0;
  const bool measured = machine_.measured_curve(kind, world_size_, communication_units, dtype) != nullptr;
  if (measured || machine_.levels.empty()) return curve(kind, communication_units, dtype).time_us(bytes);
  const std::size_t level = level_between(machine_.levels, from, to);
  // Two ranks are no tree: the latency does not grow with the number of domains.
  return machine_.levels[level].latency_us + static_cast<double>(bytes) * uses_[level].us_per_byte;
}

std::size_t Network::port(std::size_t level, std::int64_t rank, bool outgoing) const {
  const LevelUse& use = uses_[level];
  const std::int64_t domain = rank / use.inner_ranks;
  const std::int64_t number = domain * use.ports + rank % use.inner_ranks % use.ports;
  return first_port_[level] + 2 * static_cast<std::size_t>(number) + (outgoing ? 1 : 0);
}

std::int64_t Network::start_collective(TransferKind kind, std::int64_t bytes, double alone_us, double now_us,
                                       std::vector<std::int64_t>& changed) {
  Flow flow;
  for (std::size_t level = 0; level < uses_.size(); ++level) {
    if (uses_[level].fan_out < 2) continue;
    // With a topology, what it says the port is busy; with curves only, the collective takes its ports whole.
    const double busy_us = machine_.levels.empty() ? alone_us
                                                   : wire_us_per_byte(kind, uses_, level, world_size_) *
                                                         static_cast<double>(bytes);
    const double fraction = alone_us > 0 ? std::min(1.0, busy_us / alone_us) : 0;
    const std::size_t end = level + 1 < first_port_.size() ? first_port_[level + 1] : load_.size();
    for (std::size_t p = first_port_[level]; p < end; ++p) flow.ports.emplace_back(p, fraction);
  }
  return start(std::move(flow), alone_us, now_us, changed);
}

std::int64_t Network::start_message(std::int64_t bytes, std::int64_t from, std::int64_t to, double alone_us,
                                    double now_us, std::vector<std::int64_t>& changed) {
  Flow flow;
  if (from != to && bytes > 0) {
    const std::size_t level = machine_.levels.empty() ? 0 : level_between(machine_.levels, from, to);
    const double busy_us =
        machine_.levels.empty() ? alone_us : uses_[level].us_per_byte * static_cast<double>(bytes);
    const double fraction = alone_us > 0 ? std::min(1.0, busy_us / alone_us) : 0;
    flow.ports = {{port(level, from, true), fraction}, {port(level, to, false), fraction}};
  }
  return start(std::move(flow), alone_us, now_us, changed);
}

std::int64_t Network::start(Flow flow, double alone_us, double now_us, std::vector<std::int64_t>& changed) {
  const std::int64_t number = next_flow_++;
  flow.since_us = now_us;
  flow.end_us = now_us + alone_us;
  for (const auto& [p, fraction] : flow.ports) {
    load_[p] += fraction;
    port_flows_[p].push_back(number);  // the highest so far
  }
  const Flow& started = flows_.emplace(number, std::move(flow)).first->second;
  share(started.ports, now_us, changed);
  if (std::find(changed.begin(), changed.end(), number) == changed.end()) changed.push_back(number);
  return number;
}

void Network::finish(std::int64_t number, double now_us, std::vector<std::int64_t>& changed) {
  const Flow ended = std::move(flows_.at(number));
  flows_.erase(number);
  for (const auto& [p, fraction] : ended.ports) {
    load_[p] = std::max(0.0, load_[p] - fraction);
    port_flows_[p].erase(std::ranges::lower_bound(port_flows_[p], number));
  }
  share(ended.ports, now_us, changed);
}

/// A flow runs at the rate of its most loaded port. Only flows whose rate changes get a new end, so that a
/// flow that never shares keeps the exact end it started with. The rates of flows elsewhere cannot have
/// changed: with a thousand ranks that put to each other, looking at all flows would take nearly all of the
/// time.
void Network::share(const std::vector<std::pair<std::size_t, double>>& ports, double now_us,
                    std::vector<std::int64_t>& changed) {
  constexpr double kFull = 1 + 1e-9;  // sums of fractions are rounded
  std::vector<std::int64_t> touched;
  for (const auto& [p, fraction] : ports) {
    touched.insert(touched.end(), port_flows_[p].begin(), port_flows_[p].end());
  }
  std::ranges::sort(touched);
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  for (const std::int64_t number : touched) {
    Flow& flow = flows_.at(number);
    double load = 1;
    for (const auto& [p, fraction] : flow.ports) {
      if (load_[p] > kFull) load = std::max(load, load_[p]);
    }
    const double rate = 1 / load;
    if (rate == flow.rate) continue;
    const double left_alone_us = (flow.end_us - now_us) * flow.rate;
    flow.end_us = now_us + left_alone_us / rate;
    flow.rate = rate;
    ++flow.version;
    changed.push_back(number);
  }
}

}  // namespace flashoverlap::sim

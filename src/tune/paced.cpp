#include <algorithm>
#include <cmath>

#include "flashoverlap/call_tuner.h"
#include "sim/topology.h"

namespace flashoverlap {
namespace {

/// Sizes at which a paced curve is sampled, besides the measured ones: its two branches cross between them.
constexpr double kSmallest = 1024;
constexpr double kLargest = 4096.0 * 1024 * 1024;
constexpr double kStep = 1.25;

/// What a measured transfer of next to nothing takes is the software's part, and a paced transfer has it too.
BandwidthCurve pace(const BandwidthCurve& curve, double latency_us, double us_per_byte) {
  const double software_us = curve.points().front().time_us;
  std::vector<double> sizes;
  for (const CurvePoint& point : curve.points()) sizes.push_back(point.bytes);
  for (double size = kSmallest; size <= kLargest; size *= kStep) sizes.push_back(std::floor(size));
  std::vector<CurvePoint> points;
  for (const double size : sizes) {
    const double copied_us = curve.time_us(static_cast<std::int64_t>(size));
    points.push_back({size, std::max(copied_us, software_us + latency_us + size * us_per_byte), 0});
  }
  return {std::move(points), curve.name() + ", paced"};
}

}  // namespace

MachineProfile paced(const MachineProfile& machine, const LinkModel& link) {
  if (link.bandwidth_gbps == 0 && link.latency_us == 0) return machine;
  MachineProfile result = machine;
  TopologyLevel level{.name = "paced link",
                      .ranks = 0,
                      .ports = 0,
                      .latency_us = link.latency_us,
                      .bandwidth_gbps = link.bandwidth_gbps,
                      .latency_grows = false,
                      .source = "LinkModel of the in-process communicator"};
  constexpr double kUnlimited = 1e9;
  if (link.bandwidth_gbps == 0) level.bandwidth_gbps = kUnlimited;
  result.levels = {level};
  for (CommunicationCurve& curve : result.curves) {
    const auto uses = sim::level_uses(result.levels, curve.world_size, machine.name);
    const sim::CollectiveCost cost = sim::collective_cost(curve.collective, uses, curve.world_size);
    curve.curve = pace(curve.curve, cost.latency_us, cost.us_per_byte);
  }
  return result;
}

}  // namespace flashoverlap

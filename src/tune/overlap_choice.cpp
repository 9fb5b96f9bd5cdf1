#include "flashoverlap/overlap_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <vector>

#include "tune/alike.h"

namespace flashoverlap {
namespace {

double simulated_us(const OverlapRequest& request, const std::function<OverlapPlan(std::int32_t rank)>& plan,
                    const MachineProfile& machine) {
  std::vector<OverlapPlan> plans;
  for (std::int32_t rank = 0; rank < request.tail_free.world_size; ++rank) plans.push_back(plan(rank));
  return simulate(std::span<const OverlapPlan>(plans), machine, request.tail_free.simulation).total_us;
}

}  // namespace

std::string_view name_of(OverlapWay way) {
  switch (way) {
    case OverlapWay::kTailFree:
      return "tail-free";
    case OverlapWay::kSignal:
      return "signal";
    case OverlapWay::kSerial:
      return "serial";
  }
  return "?";
}

OverlapChoice choose_overlap(const OverlapRequest& request, const MachineProfile& machine) {
  struct Priced {
    OverlapWay way;
    double us;
  };
  OverlapChoice choice;
  choice.parts = choose_parts(request.tail_free, machine);
  choice.signal_us = simulated_us(request, request.signal, machine);
  choice.serial_us = simulated_us(request, request.serial, machine);
  const Priced priced[] = {{OverlapWay::kTailFree, choice.parts.total_us},
                           {OverlapWay::kSignal, choice.signal_us},
                           {OverlapWay::kSerial, choice.serial_us}};
  const double best_us = std::ranges::min(priced, {}, &Priced::us).us;
  const Priced* chosen =
      std::ranges::find_if(priced, [&](const Priced& p) { return p.us <= tune::kAlike * best_us; });
  choice.way = chosen->way;
  choice.reason = fmt::format("{}: {:.1f} us simulated", name_of(chosen->way), chosen->us);
  const char* separator = "; ";
  for (const Priced& other : priced) {
    if (other.way == chosen->way) continue;
    choice.reason += fmt::format("{}{}: {:.1f} us", separator, name_of(other.way), other.us);
    separator = ", ";
  }
  return choice;
}

}  // namespace flashoverlap

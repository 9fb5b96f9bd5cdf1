#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/plan.h"
#include "flashoverlap/slice_choice.h"

/// Whether a call that can be overlapped in several ways should be, and how: found by simulating the plans of
/// all ranks. Slices by direct transfers leave nothing exposed where links are alike; where many ranks share
/// a slow one (between hosts), a collective sends less over it.
namespace flashoverlap {

enum class OverlapWay {
  kTailFree,  ///< Slices by direct transfers (arXiv 2604.24013).
  kSignal,    ///< Wave groups that signal, a collective for each (arXiv 2504.19519).
  kSerial,    ///< One collective, behind the GEMM.
};

[[nodiscard]] std::string_view name_of(OverlapWay way);  ///< "tail-free", "signal", "serial"

struct OverlapRequest {
  PartsRequest tail_free;
  std::function<OverlapPlan(std::int32_t rank)> signal;
  std::function<OverlapPlan(std::int32_t rank)> serial;
};

struct OverlapChoice {
  OverlapWay way = OverlapWay::kTailFree;
  PartsChoice parts;     ///< Of the tail-free plan, whichever way is chosen.
  double signal_us = 0;  ///< Simulated, the slowest rank.
  double serial_us = 0;
  std::string reason;  ///< One line: which is chosen, and what the others take.
};

/// The first of tail-free, signal and serial that is within half a percent of the quickest. Deterministic.
/// Throws what choose_parts and the request's functions throw.
[[nodiscard]] OverlapChoice choose_overlap(const OverlapRequest& request, const MachineProfile& machine);

}  // namespace flashoverlap

#pragma once

#include <cstdint>

#include "flashoverlap/plan.h"

namespace flashoverlap::sim {

/// Size of a transfer as bandwidth curves count it (CommunicationCurve): the whole buffer of one rank. An
/// uneven all-to-all counts as the even one whose rank sends to others as much as the larger of what this
/// rank sends to others and receives from others (LinkModel has the same rule).
std::int64_t curve_bytes(const OverlapPlan& plan, const Transfer& transfer);

/// What leaves this rank for others and what comes from others, in bytes of payload (not of the algorithm's
/// traffic).
struct Payload {
  std::int64_t sent = 0;
  std::int64_t received = 0;
};
Payload payload_bytes(const OverlapPlan& plan, const Transfer& transfer);

}  // namespace flashoverlap::sim

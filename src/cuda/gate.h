// Holding a GEMM's tiles until the part of A or B that they read has arrived from another rank.
#pragma once

#include <cstdint>

#include "wait.h"

namespace flashoverlap::cuda {

/// Start gates of one plan on the device. Slices arrive one after the other in one stream, so that the number
/// of arrivals says all: position p may start once `arrivals` has reached needed[p]. Where a tile's operands
/// lie in several blocks, each has a gate: it may read block b once needed[p * per_position + b] is reached.
///
/// Protocol of `arrivals`: set to zero in the caller's stream at the start of a call, before the GEMM and
/// before the first transfer; then written after each transfer that brings a slice, in that transfer's stream
/// (`enqueue_write_value` or `launch_write_kernel`, release at system scope); read by the warps that load
/// operands (acquire at system scope, then a proxy fence where the copy engine reads what it guards).
struct DeviceGates {
  const std::uint32_t* needed = nullptr;  ///< [num_positions, per_position]; 0: open. Null: no gates.
  std::int32_t per_position = 1;
  const std::uint32_t* arrivals = nullptr;
  const std::uint32_t* abort = nullptr;       ///< Device-accessible; a value other than 0 ends all waits.
  WaitError* error = nullptr;                 ///< As of WaitParams; `group` is the arrival waited for.
  std::uint64_t timeout_ns = 60'000'000'000;  ///< Of one wait.
};

}  // namespace flashoverlap::cuda

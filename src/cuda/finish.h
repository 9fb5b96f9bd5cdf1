// Adding, at a tile's end, what other ranks have computed of it.
#pragma once

#include <cstdint>

#include "gate.h"

namespace flashoverlap::cuda {

/// Finish gates of one plan on the device: a tile that has them waits, before it is stored, until `arrivals`
/// has reached gates.needed[p] (see DeviceGates), and is stored as the sum over all ranks, in their order and
/// in float32, its own part rounded as if it had been received. Source: arXiv 2604.24013 (the own slice comes
/// last, and its epilogue adds what has arrived).
struct DeviceFinish {
  DeviceGates gates;
  const void* received = nullptr;         ///< Other ranks' tiles, each dense.
  const std::int64_t* offsets = nullptr;  ///< [num_positions][others]: where in it, by rank; -1: adds nothing
  std::int32_t others = 0;                ///< Ranks but this one.
  std::int32_t lower = 0;                 ///< Those before this one.
};

}  // namespace flashoverlap::cuda

// What is done with a tile at its end, before it is stored: what other ranks have computed of it is added,
// and the epilogue applied.
#pragma once

#include <cstdint>

#include "flashoverlap/executor.h"
#include "gate.h"

namespace flashoverlap::cuda {

/// Finish gates of one plan on the device: a tile that has them waits, before it is stored, until `arrivals`
/// has reached gates.needed[p] (see DeviceGates), and is stored as the sum over all ranks, in their order and
/// in float32, its own part rounded as if it had been received. Source: arXiv 2604.24013 (the own slice comes
/// last, and its epilogue adds what has arrived).
///
/// `epilogue`: of tiles that are stored in the output; without RMSNorm, which needs whole rows. It is applied
/// to the product or the sum as it would be stored, with the bits of a pass over the output.
struct DeviceFinish {
  DeviceGates gates;                      ///< needed null: nothing is added.
  const void* received = nullptr;         ///< Other ranks' tiles, each dense.
  const std::int64_t* offsets = nullptr;  ///< [num_positions][others]: where in it, by rank; -1: adds nothing
  std::int32_t others = 0;                ///< Ranks but this one.
  std::int32_t lower = 0;                 ///< Those before this one.
  Epilogue epilogue;
  bool has_epilogue = false;
};

}  // namespace flashoverlap::cuda

// What a rank puts into the others' memory in one call of a plan, as the consumer reads it. Host code.
#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/in_process.h"
#include "flashoverlap/plan.h"

namespace flashoverlap::cuda {

/// One put: `bytes` of the packed buffer, written at `to` of the receive buffer of `peer`, once the `tiles`
/// tiles of `group` are there. 48 bytes.
struct PutWork {
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::int64_t bytes = 0;  ///< 0: only tells the peer, see PutTable.
  std::int32_t peer = 0;
  std::int32_t group = -1;    ///< -1: waits for nothing.
  std::uint32_t ordinal = 0;  ///< Among the puts of this call to this peer, from 1.
  std::uint32_t paced_ns = 0;
  std::uint32_t tiles = 0;  ///< 0: waits for nothing.
  std::uint32_t unused = 0;
};
static_assert(sizeof(PutWork) == 48);

/// Every call puts at least once to every other rank, if only to say that it has come so far: who has heard
/// from all ranks in call n knows that all have done with what it put in call n - 1, see PutWindow.
struct PutTable {
  std::vector<PutWork> puts;            ///< In the order in which segments are complete.
  std::vector<std::uint32_t> sent;      ///< Puts of this rank to each, [world_size].
  std::vector<std::uint32_t> received;  ///< Puts of each rank to this one, [world_size].
};

/// Whether the results of this plan travel by puts.
[[nodiscard]] bool has_puts(const OverlapPlan& plan);

/// `last_ends_gemm`: the last put to every other rank comes behind all tiles of the plan. Where ranks share a
/// device, a rank must not go on to a GEMM that waits for others while theirs still needs SMs. `link`: what
/// puts to other ranks are paced to. Throws Error(kUnsupported) for puts that do not follow a group or move
/// anything but the packed to the received buffer, and for gates.
[[nodiscard]] PutTable make_put_table(const OverlapPlan& plan, bool last_ends_gemm, const LinkModel& link);

}  // namespace flashoverlap::cuda

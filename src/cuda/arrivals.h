// In which order a rank's transfers are issued on a GPU, and what each tile waits for. Knows no CUDA, so that
// it is tested everywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/plan.h"

namespace flashoverlap::cuda {

/// One call to the communicator.
struct TransferStep {
  std::int32_t channel = 0;
  std::int64_t collective = -1;  ///< Index of a transfer that is a collective; -1: a pair.
  std::int64_t send = -1;        ///< Index of a send; -1: this rank sends nothing in this step.
  std::int64_t receive = -1;     ///< Index of a receive; -1: it receives nothing.
  std::uint32_t arrivals = 0;    ///< Slices that have arrived once it is done, counted over all steps.
  bool brings_slice = false;
  bool operator==(const TransferStep&) const = default;
};

/// Collectives as the plan lists them. Sends and receives in pairs on channel 0: calls of one NCCL
/// communicator run one after the other whatever their streams, so that a send which waits for its receive
/// would hold up the receive that the peer's send waits for. In step (d, i) rank r sends its i-th message to
/// rank r + d and receives the i-th from rank r - d, in one call; all ranks go through the steps in the same
/// order, and as many of them (OverlapPlan::messages_per_pair), so that whatever waits, waits for a step that
/// is not later. They go through the distances one after the other; where blocks of A arrive, of which a tile
/// needs all, through the messages of a pair, each with all distances. Steps in which this rank does nothing
/// are there for communicators that every rank must call.
///
/// Puts are not among them (put_table.h). Throws Error(kUnsupported) for transfers set off by a slice, and
/// for slices that arrive on several channels.
[[nodiscard]] std::vector<TransferStep> transfer_steps(const OverlapPlan& plan);

/// What the tiles of a schedule wait for.
struct GateTables {
  /// [position][input block, or all of A]: arrivals before the tile reads it; 0: at once. Empty: so do all.
  std::vector<std::uint32_t> start;
  std::int64_t blocks = 1;  ///< Of A: as many gates has each position in `start`.
  /// By position: arrivals before the tile is stored; 0: it adds nothing. Empty: none does.
  std::vector<std::uint32_t> finish;
  /// With `finish`, [position][rank but this one]: the tile to add, in the received buffer; -1: none.
  std::vector<std::int64_t> added;
  /// Every tile waits for every slice, and no transfer for a tile: so the GEMM may as well come after them.
  bool waits_for_all = false;
};

/// Throws Error(kUnsupported) for gates that hold a tile within a block of A, for plans with gates at the
/// start of tiles and at their end, for a tile that adds what not each of the other ranks has sent once, for
/// a slice that no step brings, and where a transfer follows a group that is complete only after a tile with
/// a gate: in one call with what others send here, it could wait for a tile that waits for it.
[[nodiscard]] GateTables gate_tables(const OverlapPlan& plan, const std::vector<TransferStep>& steps);

/// How many tiles to begin with the first block alone, where that waits for nothing and there are others:
/// whole turns of all units, `turn` tiles each, that take no longer than the first strip of the other blocks
/// takes to arrive where communication takes as long as computation, and are no more than half of all tiles;
/// but at least one turn, if there are so many tiles.
[[nodiscard]] std::int64_t tiles_to_begin(const OverlapPlan& plan, const GateTables& tables,
                                          std::int64_t turn);

/// `start` where the first `begun` tiles come twice, first for the first block alone.
[[nodiscard]] std::vector<std::uint32_t> start_with_begun(const GateTables& tables, std::int64_t begun);

}  // namespace flashoverlap::cuda

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/call.h"

namespace flashoverlap::comm {

/// All ranks of a group, where a `Piece` names a rank.
inline constexpr int kEveryRank = -1;

/// A part of a collective that one thread does in one go: reads `count` elements at `send_offset` of the send
/// buffer of rank `source` (kEveryRank: sums that range of all send buffers, in rank order, in float32) and
/// writes them at `receive_offset` of the receive buffer of rank `destination` (kEveryRank: of each). No two
/// pieces of a call write to the same place, and none reads what another one writes, so any thread may do any
/// piece at any time.
struct Piece {
  int source = kEveryRank;
  int destination = kEveryRank;
  std::int64_t send_offset = 0;
  std::int64_t receive_offset = 0;
  std::int64_t count = 0;
};

/// Cuts a call that all ranks have made (`calls` in rank order; send and receive: calls[0] sends, calls[1]
/// receives).
std::vector<Piece> cut_into_pieces(const std::vector<std::shared_ptr<const Call>>& calls);

/// Does one piece.
void carry_out(const Piece& piece, const std::vector<std::shared_ptr<const Call>>& calls);

}  // namespace flashoverlap::comm

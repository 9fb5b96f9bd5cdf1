#include "comm/pieces.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "comm/rank_sum.h"

namespace flashoverlap::comm {
namespace {

using Calls = std::vector<std::shared_ptr<const Call>>;

// Large enough to hide the cost of claiming a piece, small enough that several ranks' threads share a large
// call.
constexpr std::int64_t kPieceElements = 16384;

const std::byte* send_of(const Calls& calls, std::size_t rank, std::int64_t element) {
  return static_cast<const std::byte*>(calls[rank]->send) + element * size_of(calls[0]->dtype);
}

std::byte* receive_of(const Calls& calls, std::size_t rank, std::int64_t element) {
  return static_cast<std::byte*>(calls[rank]->receive) + element * size_of(calls[0]->dtype);
}

void add_pieces(std::vector<Piece>& pieces, Piece whole) {
  for (std::int64_t done = 0; done < whole.count; done += kPieceElements) {
    Piece piece = whole;
    piece.send_offset += done;
    piece.receive_offset += done;
    piece.count = std::min(kPieceElements, whole.count - done);
    pieces.push_back(piece);
  }
}

void add_reduce_scatter(std::vector<Piece>& pieces, const std::vector<std::int64_t>& counts) {
  std::int64_t offset = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    add_pieces(pieces, {kEveryRank, static_cast<int>(rank), offset, 0, counts[rank]});
    offset += counts[rank];
  }
}

void add_all_gather(std::vector<Piece>& pieces, const std::vector<std::int64_t>& counts) {
  std::int64_t offset = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    add_pieces(pieces, {static_cast<int>(rank), kEveryRank, 0, offset, counts[rank]});
    offset += counts[rank];
  }
}

void add_all_to_all(std::vector<Piece>& pieces, const Calls& calls) {
  std::vector<std::int64_t> received(calls.size(),
                                     0);  // Elements before the next source's chunk, by destination.
  for (std::size_t source = 0; source < calls.size(); ++source) {
    std::int64_t sent = 0;
    for (std::size_t destination = 0; destination < calls.size(); ++destination) {
      const std::int64_t count = calls[source]->send_counts[destination];
      add_pieces(pieces, {static_cast<int>(source), static_cast<int>(destination), sent,
                          received[destination], count});
      sent += count;
      received[destination] += count;
    }
  }
}

struct RankRange {
  std::size_t begin;
  std::size_t end;
};

RankRange destinations_of(const Piece& piece, const Calls& calls) {
  if (piece.destination == kEveryRank) return {0, calls.size()};
  const auto rank = static_cast<std::size_t>(piece.destination);
  return {rank, rank + 1};
}

void copy(const Piece& piece, const Calls& calls) {
  const std::byte* from = send_of(calls, static_cast<std::size_t>(piece.source), piece.send_offset);
  const RankRange ranks = destinations_of(piece, calls);
  for (std::size_t rank = ranks.begin; rank < ranks.end; ++rank) {
    std::byte* to = receive_of(calls, rank, piece.receive_offset);
    if (to != from) std::memcpy(to, from, static_cast<std::size_t>(piece.count * size_of(calls[0]->dtype)));
  }
}

void sum(const Piece& piece, const Calls& calls) {
  const RankRange ranks = destinations_of(piece, calls);
  std::vector<const std::byte*> from;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    from.push_back(send_of(calls, rank, piece.send_offset));
  }
  std::vector<std::byte*> to;
  for (std::size_t rank = ranks.begin; rank < ranks.end; ++rank) {
    to.push_back(receive_of(calls, rank, piece.receive_offset));
  }
  sum_in_rank_order(from, to, calls[0]->dtype, piece.count);
}

}  // namespace

std::vector<Piece> cut_into_pieces(const Calls& calls) {
  std::vector<Piece> pieces;
  const Call& first = *calls[0];
  switch (first.kind) {
    case CallKind::kAllReduce:
      add_pieces(pieces, {kEveryRank, kEveryRank, 0, 0, first.send_counts[0]});
      break;
    case CallKind::kReduceScatter:
      add_reduce_scatter(pieces, first.send_counts);
      break;
    case CallKind::kAllGather:
      add_all_gather(pieces, first.receive_counts);
      break;
    case CallKind::kAllToAll:
      add_all_to_all(pieces, calls);
      break;
    case CallKind::kSend:
      add_pieces(pieces, {0, 1, 0, 0, first.send_counts[0]});
      break;
    default:
      break;
  }
  return pieces;
}

void carry_out(const Piece& piece, const Calls& calls) {
  if (piece.source == kEveryRank) {
    sum(piece, calls);
  } else {
    copy(piece, calls);
  }
}

}  // namespace flashoverlap::comm

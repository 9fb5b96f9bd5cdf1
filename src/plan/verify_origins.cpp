#include <fmt/format.h>

#include <algorithm>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify_ranks.h"

namespace flashoverlap::plan {
namespace {

using core::no;

/// Elements [begin, end) of a received buffer come from `source`'s packed buffer, from `offset` on.
struct Arrival {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::size_t source = 0;
  std::int64_t offset = 0;
};

/// A row of the product of one rank.
struct ProductRow {
  std::size_t source = 0;
  std::int64_t row = 0;
  auto operator<=>(const ProductRow&) const = default;
};

class Origins {
 public:
  Origins(Plans plans, std::span<const Facts> facts, const Matching& matching)
      : plans_(plans), facts_(facts), arrivals_(plans.size()) {
    for (std::size_t r = 0; r < plans.size(); ++r) {
      for (std::int64_t i = 0; i < std::ssize(plans[r].transfers); ++i) {
        const Transfer& t = plans[r].transfers[index(i)];
        if (t.kind == TransferKind::kAllToAll) add_all_to_all(r, i, matching);
        if (t.kind == TransferKind::kSend) {
          const TransferId partner = matching.partner[r][index(i)];
          const std::size_t peer = index(partner.rank);
          add(peer, plans[peer].transfers[index(partner.transfer)].destination, r, t.source);
        }
        if (t.kind == TransferKind::kPut) add(index(t.peer), t.destination, r, t.source);
      }
    }
    for (auto& list : arrivals_) std::ranges::sort(list, {}, &Arrival::begin);
  }

  /// The product's rows that `rows` rows of `cols` elements at `offset` of rank r's received buffer hold.
  /// They must hold columns [col_begin, col_begin + cols). Left empty when some of it does not come from a
  /// packed buffer.
  Verdict rows_at(std::size_t r, std::int64_t offset, std::int64_t rows, std::int64_t cols,
                  std::int64_t col_begin, const std::string& what, std::vector<ProductRow>& out) const {
    out.clear();
    auto arrival =
        std::ranges::partition_point(arrivals_[r], [&](const Arrival& a) { return a.end <= offset; });
    for (std::int64_t i = 0; i < rows; ++i, offset += cols) {
      while (arrival != arrivals_[r].end() && arrival->end <= offset) ++arrival;
      if (arrival == arrivals_[r].end() || arrival->begin > offset) {
        out.clear();
        return {};
      }
      const OverlapPlan& source = plans_[arrival->source];
      const Origin origin =
          origin_of(source, facts_[arrival->source], arrival->offset + offset - arrival->begin);
      const Tile& tile = source.grid.tile(origin.tile);
      if (origin.col != col_begin || origin.col + cols > tile.col_begin + tile.cols ||
          offset + cols > arrival->end) {
        return no(
            "rank {}: {} takes {} elements for column {} at element {} of the received buffer, where rank {} "
            "has sent "
            "row {} of its tile {}, which ends at column {}, from column {} on",
            r, what, cols, col_begin, offset, arrival->source, origin.row, origin.tile,
            tile.col_begin + tile.cols, origin.col);
      }
      out.push_back({arrival->source, origin.row});
    }
    return {};
  }

 private:
  void add(std::size_t r, const Region& destination, std::size_t source_rank, const Region& source) {
    if (destination.buffer != BufferKind::kReceived || source.buffer != BufferKind::kPacked ||
        destination.count == 0)
      return;
    arrivals_[r].push_back(
        {destination.offset, destination.offset + destination.count, source_rank, source.offset});
  }

  /// Rank r's part of one all-to-all, chunk by chunk.
  void add_all_to_all(std::size_t r, std::int64_t i, const Matching& matching) {
    const Transfer& t = plans_[r].transfers[index(i)];
    const auto channel =
        index(std::ranges::lower_bound(matching.channels, t.channel) - matching.channels.begin());
    Region destination{t.destination.buffer, t.destination.offset, 0};
    for (std::size_t s = 0; s < plans_.size(); ++s) {
      destination.count = t.receive_counts[s];
      const Transfer& sent = matching_transfer(s, channel, matching.ordinal[r][index(i)], matching);
      Region source{sent.source.buffer, sent.source.offset, destination.count};
      for (std::size_t d = 0; d < r; ++d) source.offset += sent.send_counts[d];
      add(r, destination, s, source);
      destination.offset += destination.count;
    }
  }

  [[nodiscard]] const Transfer& matching_transfer(std::size_t r, std::size_t channel, std::int64_t ordinal,
                                                  const Matching& matching) const {
    for (const std::int64_t i : matching.transfers[r][channel]) {
      const Transfer& t = plans_[r].transfers[index(i)];
      if (is_collective(t.kind) && matching.ordinal[r][index(i)] == ordinal) return t;
    }
    core::fail(ErrorKind::kInternal, "rank {} has no collective {} although transfers match", r, ordinal);
  }

  Plans plans_;
  std::span<const Facts> facts_;
  std::vector<std::vector<Arrival>> arrivals_;
};

/// All pieces of a band hold the same rows of the same rank.
Verdict check_band(const OverlapPlan& plan, const Origins& origins, std::int64_t b,
                   std::vector<ProductRow>& rows) {
  const RestoreBand& band = plan.restore.bands[index(b)];
  const auto r = static_cast<std::size_t>(plan.rank);
  std::vector<ProductRow> other;
  rows.clear();
  for (std::int64_t p = band.first_piece; p < band.first_piece + band.num_pieces; ++p) {
    const RestorePiece& piece = plan.restore.pieces[index(p)];
    const std::string what = fmt::format("restore piece {} of band {}", p, b);
    auto& found = p == band.first_piece ? rows : other;
    if (Verdict v = origins.rows_at(r, piece.offset, band.rows, piece.cols, piece.col_begin, what, found); !v)
      return v;
    if (p == band.first_piece || rows.empty() || other.empty()) continue;
    const auto [mine, theirs] = std::ranges::mismatch(rows, other);
    if (mine == rows.end()) continue;
    return no("rank {}: restore band {} mixes row {} of rank {} and row {} of rank {} (pieces {} and {})",
              plan.rank, b, mine->row, mine->source, theirs->row, theirs->source, band.first_piece, p);
  }
  return {};
}

Verdict check_restored(const OverlapPlan& plan, const Origins& origins) {
  if (plan.restore.source != BufferKind::kReceived) return {};
  ProductRow previous{0, -1};
  std::vector<ProductRow> rows;
  for (std::int64_t b = 0; b < std::ssize(plan.restore.bands); ++b) {
    if (Verdict v = check_band(plan, origins, b, rows); !v) return v;
    if (plan.operation != "gemm-all-to-all") continue;
    // Here the order of rows is part of what the operation means: by source, then by row.
    for (const ProductRow& row : rows) {
      if (row <= previous) {
        return no("rank {}: restore band {} has row {} of rank {} after row {} of rank {}", plan.rank, b,
                  row.row, row.source, previous.row, previous.source);
      }
      previous = row;
    }
  }
  return {};
}

/// A received tile is the other rank's part of the very tile that it is added to.
Verdict check_added(const OverlapPlan& plan, const Origins& origins) {
  std::vector<ProductRow> rows;
  for (std::size_t g = 0; g < plan.gates.size(); ++g) {
    const Gate& gate = plan.gates[g];
    if (gate.point != GatePoint::kFinish) continue;
    const Tile& tile = plan.grid.tile(gate.tile);
    const auto r = static_cast<std::size_t>(plan.rank);
    const std::string what = fmt::format("gate {} of tile {}", g, gate.tile);
    if (Verdict v = origins.rows_at(r, gate.offset, tile.rows, tile.cols, tile.col_begin, what, rows); !v)
      return v;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].row == tile.row_begin + static_cast<std::int64_t>(i)) continue;
      return no("rank {}: {} adds row {} of rank {} to row {}", plan.rank, what, rows[i].row, rows[i].source,
                tile.row_begin + static_cast<std::int64_t>(i));
    }
  }
  return {};
}

}  // namespace

Verdict check_origins(Plans plans, std::span<const Facts> facts, const Matching& matching) {
  const Origins origins(plans, facts, matching);
  for (const OverlapPlan& plan : plans) {
    if (Verdict v = check_restored(plan, origins); !v) return v;
    if (Verdict v = check_added(plan, origins); !v) return v;
  }
  return {};
}

}  // namespace flashoverlap::plan

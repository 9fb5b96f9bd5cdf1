#include <fmt/format.h>

#include <algorithm>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify_ranks.h"

namespace flashoverlap::plan {
namespace {

using core::no;

/// A row of the product of one rank.
struct ProductRow {
  std::size_t source = 0;
  std::int64_t row = 0;
  auto operator<=>(const ProductRow&) const = default;
};

class Origins {
 public:
  Origins(Plans plans, std::span<const Facts> facts, const Matching& matching)
      : plans_(plans), facts_(facts), arrivals_(arrivals_from(plans, matching, BufferKind::kPacked)) {}

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

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify.h"

/// The restore covers the output once, but for rows that tiles write in place, reads only what has arrived,
/// and puts it where the product has it; nothing that was packed or received is left unused.
namespace flashoverlap::plan {
namespace {

using core::no;

/// Elements [begin, end) that hold finished data, and how many of them have been read.
struct Ready {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t read = 0;
  std::int64_t tile = -1;              ///< A tile that stays here, …
  const Incoming* incoming = nullptr;  ///< … or what arrives.
};

class ReadyData {
 public:
  void add(const Ready& ready) { ready_.push_back(ready); }
  void sort() { std::ranges::sort(ready_, {}, &Ready::begin); }

  /// Marks [begin, end) as read. Returns the first element that is not ready, or `end`.
  std::int64_t read(std::int64_t begin, std::int64_t end) {
    auto it = std::ranges::partition_point(ready_, [&](const Ready& r) { return r.end <= begin; });
    for (; begin < end && it != ready_.end() && it->begin <= begin; ++it) {
      const std::int64_t stop = std::min(end, it->end);
      it->read += stop - begin;
      begin = stop;
    }
    return begin;
  }

  [[nodiscard]] const std::vector<Ready>& all() const { return ready_; }

 private:
  std::vector<Ready> ready_;
};

bool has_finish_gate(const OverlapPlan& plan, std::int64_t tile) {
  auto it = std::ranges::lower_bound(plan.gates, tile, {}, &Gate::tile);
  for (; it != plan.gates.end() && it->tile == tile; ++it) {
    if (it->point == GatePoint::kFinish) return true;
  }
  return false;
}

/// Sources of transfers in a buffer, merged.
std::vector<std::pair<std::int64_t, std::int64_t>> sent_ranges(const OverlapPlan& plan, BufferKind buffer) {
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (const Transfer& t : plan.transfers) {
    if (t.source.buffer == buffer && t.source.count > 0) {
      ranges.emplace_back(t.source.offset, t.source.offset + t.source.count);
    }
  }
  std::ranges::sort(ranges);
  std::vector<std::pair<std::int64_t, std::int64_t>> merged;
  for (const auto& range : ranges) {
    if (!merged.empty() && range.first <= merged.back().second) {
      merged.back().second = std::max(merged.back().second, range.second);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

/// Packed tiles that no transfer takes away stay for the restore; only a tile whose epilogue has added the
/// other ranks' parts is complete without a transfer.
Verdict add_kept_tiles(const OverlapPlan& plan, const Facts& facts, ReadyData& ready) {
  const auto sent = sent_ranges(plan, BufferKind::kPacked);
  auto range = sent.begin();
  for (const PackedPiece& piece : facts.packed) {
    while (range != sent.end() && range->second <= piece.begin) ++range;
    const bool touched = range != sent.end() && range->first < piece.end;
    if (touched && range->first <= piece.begin && piece.end <= range->second) continue;
    if (touched || (plan.world_size > 1 && !has_finish_gate(plan, piece.tile))) {
      return no(
          "tile {} of group {}, at elements [{}, {}) of the packed buffer, is not sent{} by any transfer",
          piece.tile, facts.group_of_tile[index(piece.tile)], piece.begin, piece.end,
          touched ? " as a whole" : "");
    }
    ready.add({.begin = piece.begin, .end = piece.end, .tile = piece.tile});
  }
  return {};
}

/// How many columns of each output row tiles write in place.
class InPlaceRows {
 public:
  explicit InPlaceRows(const OverlapPlan& plan) : plan_(plan) {
    for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
      if (!plan.placement.of_tile(t).empty()) continue;
      if (cols_.empty()) cols_.assign(index(plan.output_rows) + 1, 0);
      const Tile& tile = plan.grid.tile(t);  // inside the output: see check_output
      cols_[index(tile.row_begin + plan.output_row_shift)] += tile.cols;
      cols_[index(tile.row_begin + tile.rows + plan.output_row_shift)] -= tile.cols;
    }
    std::partial_sum(cols_.begin(), cols_.end(), cols_.begin());
  }

  /// Whether rows [begin, end) are written whole.
  [[nodiscard]] bool all(std::int64_t begin, std::int64_t end) const {
    if (begin == end || plan_.output_cols == 0) return true;
    return !cols_.empty() &&
           std::all_of(at(begin), at(end), [&](std::int64_t cols) { return cols == plan_.output_cols; });
  }
  /// The first of rows [begin, end) that a tile writes to; `end`: none.
  [[nodiscard]] std::int64_t first(std::int64_t begin, std::int64_t end) const {
    if (cols_.empty()) return end;
    return begin + (std::find_if(at(begin), at(end), [](std::int64_t cols) { return cols > 0; }) - at(begin));
  }

 private:
  [[nodiscard]] std::vector<std::int64_t>::const_iterator at(std::int64_t row) const {
    return cols_.begin() + row;
  }
  const OverlapPlan& plan_;
  std::vector<std::int64_t> cols_;  // empty: no tile does
};

Verdict check_band_shape(const OverlapPlan& plan, const InPlaceRows& in_place, std::int64_t b,
                         std::int64_t next_row) {
  const RestoreBand& band = plan.restore.bands[index(b)];
  const std::int64_t num_pieces = std::ssize(plan.restore.pieces);
  // Rows in between that tiles write in place need no band.
  if (band.row_begin > next_row && band.row_begin <= plan.output_rows &&
      in_place.all(next_row, band.row_begin)) {
    next_row = band.row_begin;
  }
  if (band.row_begin != next_row || band.rows < 1 || band.rows > plan.output_rows - next_row) {
    return no("restore band {} covers {} rows from row {} on, but row {} of {} comes next", b, band.rows,
              band.row_begin, next_row, plan.output_rows);
  }
  const std::int64_t written = in_place.first(next_row, next_row + band.rows);
  if (written < next_row + band.rows)
    return no("restore band {} overwrites row {}, which a tile writes in place", b, written);
  if (band.first_piece < 0 || band.num_pieces < 0 || band.num_pieces > num_pieces ||
      band.first_piece > num_pieces - band.num_pieces) {
    return no("restore band {} has {} pieces from piece {} on, but there are {}", b, band.num_pieces,
              band.first_piece, num_pieces);
  }
  std::int64_t col = 0;
  for (std::int64_t p = band.first_piece; p < band.first_piece + band.num_pieces; ++p) {
    const RestorePiece& piece = plan.restore.pieces[index(p)];
    if (piece.col_begin != col || piece.cols < 1 || piece.cols > plan.output_cols - col) {
      return no(
          "restore piece {} of band {} covers {} columns from column {} on, but column {} of {} comes next",
          p, b, piece.cols, piece.col_begin, col, plan.output_cols);
    }
    col += piece.cols;
  }
  if (col != plan.output_cols) {
    return no("restore band {} leaves columns [{}, {}) unwritten", b, col, plan.output_cols);
  }
  return {};
}

/// What a band reads in the packed buffer is one run of the product's rows, column for column. Returns the
/// run's end.
Verdict check_band_origin(const OverlapPlan& plan, const Facts& facts, std::int64_t b,
                          std::int64_t& next_product_row) {
  const RestoreBand& band = plan.restore.bands[index(b)];
  std::int64_t row = -1;
  for (std::int64_t p = band.first_piece; p < band.first_piece + band.num_pieces; ++p) {
    const RestorePiece& piece = plan.restore.pieces[index(p)];
    const Origin origin = origin_of(plan, facts, piece.offset);
    const Tile& tile = plan.grid.tile(origin.tile);
    const bool dense = band.rows == 1 ? origin.col + piece.cols <= tile.col_begin + tile.cols
                                      : origin.col == tile.col_begin && piece.cols == tile.cols;
    if (origin.col != piece.col_begin || !dense || origin.rows_left < band.rows) {
      return no(
          "restore piece {} of band {} reads {} x {} elements for column {} at offset {}, where tile {} has "
          "column "
          "{}, row width {} and {} more rows",
          p, b, band.rows, piece.cols, piece.col_begin, piece.offset, origin.tile, origin.col, tile.cols,
          origin.rows_left);
    }
    if (row < 0) row = origin.row;
    if (origin.row != row) {
      return no("restore band {} mixes rows {} and {} of the product (pieces {} and {})", b, row, origin.row,
                band.first_piece, p);
    }
  }
  if (row < next_product_row) {
    return no("restore band {} begins at row {} of the product, but the band before ends at row {}", b, row,
              next_product_row);
  }
  next_product_row = row + band.rows;
  return {};
}

/// Every element read once.
Verdict check_read_once(const OverlapPlan& plan, std::vector<std::pair<std::int64_t, std::int64_t>>& reads) {
  if (!std::ranges::is_sorted(reads)) std::ranges::sort(reads);
  for (std::size_t i = 1; i < reads.size(); ++i) {
    if (reads[i].first < reads[i - 1].second) {
      return no("the restore reads element {} of the {} buffer twice", reads[i].first,
                name_of(plan.restore.source));
    }
  }
  return {};
}

Verdict check_bands(const OverlapPlan& plan, const Facts& facts, ReadyData& ready) {
  std::vector<std::pair<std::int64_t, std::int64_t>> reads;
  reads.reserve(plan.restore.pieces.size());
  const InPlaceRows in_place(plan);
  std::int64_t row = 0;
  std::int64_t product_row = 0;
  for (std::int64_t b = 0; b < std::ssize(plan.restore.bands); ++b) {
    const RestoreBand& band = plan.restore.bands[index(b)];
    if (Verdict v = check_band_shape(plan, in_place, b, row); !v) return v;
    row = band.row_begin + band.rows;
    for (std::int64_t p = band.first_piece; p < band.first_piece + band.num_pieces; ++p) {
      const RestorePiece& piece = plan.restore.pieces[index(p)];
      const Region region{plan.restore.source, piece.offset, band.rows * piece.cols};
      // The reason is worded only when there is one: plans have very many pieces.
      if (!check_region(facts, region, {})) {
        return check_region(facts, region, fmt::format("restore piece {} of band {}", p, b));
      }
      const std::int64_t end = region.offset + region.count;
      const std::int64_t missing = ready.read(region.offset, end);
      if (missing < end) {
        return no(
            "restore piece {} of band {} reads elements [{}, {}) of the {} buffer, but nothing finished "
            "arrives at "
            "element {}",
            p, b, region.offset, end, name_of(region.buffer), missing);
      }
      reads.emplace_back(region.offset, end);
    }
    if (plan.restore.source != BufferKind::kPacked) continue;
    if (Verdict v = check_band_origin(plan, facts, b, product_row); !v) return v;
  }
  if (!in_place.all(row, plan.output_rows))
    return no("the restore leaves rows [{}, {}) unwritten", row, plan.output_rows);
  return check_read_once(plan, reads);
}

/// Transfers that pass on what has arrived, finish gates and main loops read too.
void read_by_transfers_and_tiles(const OverlapPlan& plan, ReadyData& packed, ReadyData& received) {
  for (std::size_t i = 0; i < plan.transfers.size(); ++i) {
    const Transfer& t = plan.transfers[i];
    if (t.source == t.destination || t.kind == TransferKind::kReduceScatter) continue;
    if (t.source.buffer == BufferKind::kPacked)
      packed.read(t.source.offset, t.source.offset + t.source.count);
    if (t.source.buffer == BufferKind::kReceived)
      received.read(t.source.offset, t.source.offset + t.source.count);
  }
  for (const Gate& gate : plan.gates) {
    if (gate.point != GatePoint::kFinish) continue;
    received.read(gate.offset, gate.offset + plan.grid.tile(gate.tile).size());
  }
  if (plan.schedule.empty()) return;
  for (const InputBlock& block : plan.input_blocks) {
    if (block.buffer != BufferKind::kReceived) continue;
    received.read(block.offset, block.offset + plan.grid.rows() * block.depth);
  }
}

Verdict check_all_read(const OverlapPlan& plan, const ReadyData& data, BufferKind buffer) {
  for (const Ready& ready : data.all()) {
    if (ready.read >= ready.end - ready.begin) continue;
    const std::string what =
        ready.incoming != nullptr ? describe(plan, *ready.incoming) : fmt::format("tile {}", ready.tile);
    return no(
        "{} leaves {} elements at [{}, {}) of the {} buffer, but only {} of them are restored, added or "
        "sent "
        "on",
        what, ready.end - ready.begin, ready.begin, ready.end, name_of(buffer), ready.read);
  }
  return {};
}

}  // namespace

Verdict check_restore(const OverlapPlan& plan, const Facts& facts) {
  ReadyData packed;
  ReadyData received;
  for (const Incoming& in : facts.incoming) {
    if (in.begin == in.end) continue;
    if (in.buffer == BufferKind::kPacked) packed.add({.begin = in.begin, .end = in.end, .incoming = &in});
    if (in.buffer == BufferKind::kReceived) received.add({.begin = in.begin, .end = in.end, .incoming = &in});
  }
  if (Verdict v = add_kept_tiles(plan, facts, packed); !v) return v;
  packed.sort();
  received.sort();
  if (!plan.restore.bands.empty()) {
    const bool from_packed = plan.restore.source == BufferKind::kPacked;
    if (!from_packed && plan.restore.source != BufferKind::kReceived) {
      return no("the restore reads the {} buffer; expected packed or received", name_of(plan.restore.source));
    }
    if (Verdict v = check_bands(plan, facts, from_packed ? packed : received); !v) return v;
  }
  read_by_transfers_and_tiles(plan, packed, received);
  if (Verdict v = check_all_read(plan, packed, BufferKind::kPacked); !v) return v;
  return check_all_read(plan, received, BufferKind::kReceived);
}

}  // namespace flashoverlap::plan

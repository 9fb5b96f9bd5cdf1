#include <algorithm>
#include <utility>

#include "flashoverlap/plan_builders.h"
#include "plan/arithmetic.h"
#include "plan/builder.h"
#include "plan/heads.h"
#include "plan/slices.h"

namespace flashoverlap {
namespace {

using plan::HeadShares;
using plan::index;

constexpr std::string_view kOperation = "all-to-all-gemm";

OverlapPlan start_head_plan(const PlanOptions& options, const HeadShares& shares, std::int64_t parts,
                            std::int64_t channels) {
  const PlanOptions& own = shares.own;
  TileGrid grid({{.rows = own.m, .cols = own.n}}, own.k, own.tile_m, own.tile_n);
  OverlapPlan plan = plan::start_plan(kOperation, own, std::move(grid));
  plan.agreement = plan::hash_heads(kOperation, options, shares, parts, channels);
  return plan;
}

/// A rank that exchanges nothing multiplies what it has.
bool exchanges(const OverlapPlan& plan) {
  return plan.world_size > 1 && plan.output_cols > 0 && plan.grid.k() > 0;
}

class Builder {
 public:
  Builder(const HeadShares& shares, std::int64_t parts, OverlapPlan& plan)
      : shares_(shares), parts_(parts), plan_(plan) {
    for (const plan::RowStrip& strip : strips_of(plan.rank)) add_tiles(strip);
    plan.groups.push_back({0, std::ssize(plan.schedule)});
  }

  void tail_free(const plan::SendChannels& channels) {
    const std::int32_t ranks = plan_.world_size;
    const bool has_all =
        shares_.num_rows(plan_.rank) == shares_.rows.back() && own_columns() == shares_.columns.back();
    if (!exchanges(plan_)) return;
    plan_.messages_per_pair = plan::most_head_messages(shares_, parts_);
    if (has_all) return;
    describe_input();
    add_block(plan_.rank, BufferKind::kInput, rows_before(plan_.rank) * own_columns());
    for (std::int32_t step = 1; step < ranks; ++step) {
      send_to(plan::rank_after(plan_.rank, step, ranks), channels.of(plan_.rank, step));
      const std::int32_t source = plan::rank_after(plan_.rank, -step, ranks);
      receive_from(source, channels.of(source, step));
    }
    std::ranges::stable_sort(plan_.gates, {}, &Gate::tile);
  }

  /// The columns of each rank in `num_slices` pieces: what all ranks have of one comes by one all-to-all.
  void sliced(std::int64_t num_slices) {
    const bool is_alone = plan_.world_size == 1 && num_slices > 1 && plan_.grid.k() > 0;
    if (!is_alone && !exchanges(plan_)) return;
    describe_input();
    for (std::int64_t piece = 0; piece < num_slices; ++piece) {
      if (is_alone) {
        const Columns own = piece_of(0, num_slices, piece);
        add_columns(0, own, BufferKind::kInput, plan_.input_rows * own.begin);
      } else {
        exchange_piece(piece, num_slices);
      }
    }
    std::ranges::stable_sort(plan_.gates, {}, &Gate::tile);
  }

 private:
  /// Columns of a rank.
  struct Columns {
    std::int64_t begin = 0;
    std::int64_t depth = 0;
  };

  [[nodiscard]] Columns piece_of(std::int64_t rank, std::int64_t num_slices, std::int64_t piece) const {
    const std::int64_t columns = shares_.num_columns(rank);
    const std::int64_t begin = plan::share_begin(columns, num_slices, piece);
    return {.begin = begin, .depth = plan::share_begin(columns, num_slices, piece + 1) - begin};
  }

  void exchange_piece(std::int64_t piece, std::int64_t num_slices) {
    const Columns own = piece_of(plan_.rank, num_slices, piece);
    Transfer exchange;
    exchange.kind = TransferKind::kAllToAll;
    exchange.source = {BufferKind::kInput, plan_.input_rows * own.begin, plan_.input_rows * own.depth};
    const std::int64_t received = plan_.received_size;
    const std::int64_t loop_begin = loop_end_;
    std::vector<std::int64_t> offsets;
    for (std::int32_t rank = 0; rank < plan_.world_size; ++rank) {
      offsets.push_back(plan_.received_size);
      exchange.send_counts.push_back(shares_.num_rows(rank) * own.depth);
      exchange.receive_counts.push_back(plan_.grid.rows() * piece_of(rank, num_slices, piece).depth);
      plan_.received_size += exchange.receive_counts.back();
    }
    // As in the tail-free plan; all in one piece, so that results have the same bits.
    for (std::int32_t step = 0; step < plan_.world_size; ++step) {
      const std::int32_t source = plan::rank_after(plan_.rank, -step, plan_.world_size);
      add_columns(source, piece_of(source, num_slices, piece), BufferKind::kReceived, offsets[index(source)]);
    }
    if (loop_end_ == loop_begin) return;  // no rank has so many columns
    exchange.destination = {BufferKind::kReceived, received, plan_.received_size - received};
    exchange.slice = std::ssize(plan_.slices);
    for (std::int64_t t = 0; t < plan_.grid.num_tiles(); ++t) {
      plan_.gates.push_back({.tile = t, .slice = exchange.slice, .k_begin = loop_begin});
    }
    plan_.slices.push_back({plan_.rank, exchange.destination});
    plan_.transfers.push_back(std::move(exchange));
  }

  [[nodiscard]] std::vector<plan::RowStrip> strips_of(std::int32_t rank) const {
    return plan::cut_rows(shares_.num_rows(rank), shares_.own.tile_m, parts_);
  }
  [[nodiscard]] std::int64_t rows_before(std::int32_t rank) const { return shares_.rows[index(rank)]; }
  [[nodiscard]] std::int64_t own_columns() const { return shares_.num_columns(plan_.rank); }

  /// In the order in which they are computed.
  [[nodiscard]] std::vector<std::int64_t> tiles_of(const plan::RowStrip& strip) const {
    const std::int64_t tile_cols = plan::ceil_div(shares_.own.n, shares_.own.tile_n);
    std::vector<std::int64_t> tiles =
        swizzled_order(strip.end_tile_row - strip.first_tile_row, tile_cols, shares_.own.swizzle);
    for (std::int64_t& tile : tiles) tile += strip.first_tile_row * tile_cols;
    return tiles;
  }

  void add_tiles(const plan::RowStrip& strip) {
    const std::vector<std::int64_t> tiles = tiles_of(strip);
    plan_.schedule.insert(plan_.schedule.end(), tiles.begin(), tiles.end());
  }

  void describe_input() {
    plan_.input_rows = shares_.rows.back();
    plan_.input_cols = own_columns();
  }

  void add_block(std::int32_t source, BufferKind buffer, std::int64_t offset) {
    add_columns(source, {.begin = 0, .depth = shares_.num_columns(source)}, buffer, offset);
  }

  void add_columns(std::int32_t source, const Columns& columns, BufferKind buffer, std::int64_t offset) {
    if (columns.depth == 0) return;
    plan_.input_blocks.push_back({.k_begin = shares_.columns[index(source)] + columns.begin,
                                  .depth = columns.depth,
                                  .buffer = buffer,
                                  .offset = offset});
    loop_end_ += columns.depth;
  }

  void send_to(std::int32_t target, std::int32_t channel) {
    for (const plan::RowStrip& strip : strips_of(target)) {
      const Region region{BufferKind::kInput, (rows_before(target) + strip.row_begin) * own_columns(),
                          strip.rows * own_columns()};
      if (region.count > 0) plan_.transfers.push_back(plan::send_to(target, channel, {}, region));
    }
  }

  /// Tiles take the columns of `source` once those of their strip of rows have arrived.
  void receive_from(std::int32_t source, std::int32_t channel) {
    const std::int64_t columns = shares_.num_columns(source);
    const std::int64_t loop_begin = loop_end_;
    add_block(source, BufferKind::kReceived, plan_.received_size);
    if (columns == 0) return;
    for (const plan::RowStrip& strip : strips_of(plan_.rank)) {
      const Region region{BufferKind::kReceived, plan_.received_size, strip.rows * columns};
      const std::int64_t slice = std::ssize(plan_.slices);
      plan_.received_size += region.count;
      plan_.slices.push_back({source, region});
      plan_.transfers.push_back(plan::receive_from(source, channel, region, slice));
      for (const std::int64_t tile : tiles_of(strip)) {
        plan_.gates.push_back(
            {.tile = tile, .slice = slice, .point = GatePoint::kStart, .k_begin = loop_begin});
      }
    }
  }

  const HeadShares& shares_;
  std::int64_t parts_;
  OverlapPlan& plan_;
  std::int64_t loop_end_ = 0;  // of the blocks so far
};

}  // namespace

OverlapPlan plan_all_to_all_gemm(const PlanOptions& options, const HeadSlices& slices) {
  const HeadShares shares = plan::share_heads(options, slices, options.k);
  const plan::SendChannels channels(slices.columns.send_channels, plan::kChannelsOfGiven, options.world_size);
  OverlapPlan plan = start_head_plan(options, shares, slices.columns.parts, channels.count());
  Builder(shares, slices.columns.parts, plan).tail_free(channels);
  return plan;
}

OverlapPlan plan_serial_all_to_all_gemm(const PlanOptions& options, const HeadSlices& slices) {
  return plan_sliced_all_to_all_gemm(options, slices, 1);
}

OverlapPlan plan_sliced_all_to_all_gemm(const PlanOptions& options, const HeadSlices& slices,
                                        std::int64_t num_slices) {
  plan::check_num_slices(num_slices);
  const HeadShares shares = plan::share_heads(options, slices, options.k);
  OverlapPlan plan = start_head_plan(options, shares, -num_slices, 1);
  Builder(shares, 1, plan).sliced(num_slices);
  return plan;
}

}  // namespace flashoverlap

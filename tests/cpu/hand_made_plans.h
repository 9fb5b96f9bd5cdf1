#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "flashoverlap/plan.h"

/// Small plans that no builder makes yet, to try every part of an executor on its own. All are for matrices
/// of float32.
namespace flashoverlap::test {

struct HandMadeShape {
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::int64_t rows_per_rank = 6;
  std::int64_t n = 10;
  std::int64_t k = 7;
  std::int64_t tile = 4;
};

inline OverlapPlan plain_plan(const HandMadeShape& shape, std::vector<Problem> problems) {
  OverlapPlan plan;
  plan.operation = "hand-made";
  plan.rank = shape.rank;
  plan.world_size = shape.world_size;
  plan.grid = TileGrid(std::move(problems), shape.k, shape.tile, shape.tile);
  plan.placement.first_segment.assign(static_cast<std::size_t>(plan.grid.num_tiles()) + 1, 0);
  plan.resources.compute_units = 2;
  plan.output_rows = plan.grid.rows();
  plan.output_cols = plan.grid.cols();
  return plan;
}

/// Rank `distance` ranks away, which sends to or receives from this one on channels of their own.
inline std::int32_t peer_of(const HandMadeShape& shape, std::int32_t distance) {
  return (shape.rank + distance + shape.world_size) % shape.world_size;
}

/// out = (rows of A of all ranks, gathered while tiles run) · B^T. A is [world * rows_per_rank, k]; this
/// rank's rows are in place at the start. Tiles of other ranks' rows have start gates.
inline OverlapPlan gather_rows_plan(const HandMadeShape& shape) {
  std::vector<Problem> problems;
  for (std::int32_t d = 0; d < shape.world_size; ++d) {
    problems.push_back({.row_begin = peer_of(shape, -d) * shape.rows_per_rank,
                        .rows = shape.rows_per_rank,
                        .col_begin = 0,
                        .cols = shape.n});
  }
  OverlapPlan plan = plain_plan(shape, problems);
  const std::int64_t count = shape.rows_per_rank * shape.k;
  const Region own{BufferKind::kInput, shape.rank * count, count};
  for (std::int32_t d = 1; d < shape.world_size; ++d) {
    const std::int32_t source = peer_of(shape, -d);
    const Region arriving{BufferKind::kInput, source * count, count};
    plan.slices.push_back({source, arriving});
    Transfer send;
    send.kind = TransferKind::kSend;
    send.channel = 2 * (d - 1);
    send.peer = peer_of(shape, d);
    send.source = own;
    Transfer receive;
    receive.kind = TransferKind::kReceive;
    receive.channel = 2 * (d - 1) + 1;
    receive.peer = source;
    receive.destination = arriving;
    receive.slice = d - 1;
    plan.transfers.push_back(send);
    plan.transfers.push_back(receive);
  }
  for (std::int64_t tile = 0; tile < plan.grid.num_tiles(); ++tile) {
    plan.schedule.push_back(tile);
    const std::int64_t distance = plan.grid.tile(tile).problem;
    if (distance > 0) plan.gates.push_back({tile, distance - 1, GatePoint::kStart, 0, 0});
  }
  plan.groups = {{0, plan.grid.num_tiles()}};
  return plan;
}

/// out[rows_per_rank, n] = this rank's rows of the sum over ranks of A_r · B_r^T, without a collective: tiles
/// for the next rank first, each rank's part sent when its group is complete, own tiles last; their epilogue
/// adds what came.
inline OverlapPlan scatter_rows_plan(const HandMadeShape& shape) {
  std::vector<Problem> problems;
  for (std::int32_t d = 1; d <= shape.world_size; ++d) {
    problems.push_back({.row_begin = peer_of(shape, d) * shape.rows_per_rank,
                        .rows = shape.rows_per_rank,
                        .col_begin = 0,
                        .cols = shape.n});
  }
  OverlapPlan plan = plain_plan(shape, problems);
  plan.output_rows = shape.rows_per_rank;
  const std::int64_t count = shape.rows_per_rank * shape.n;
  const std::int64_t tiles_each = plan.grid.num_tiles() / shape.world_size;
  plan.restore.source = BufferKind::kPacked;
  std::int64_t offset_in_part = 0;
  for (std::int64_t tile = 0; tile < plan.grid.num_tiles(); ++tile) {
    const Tile& shape_of_tile = plan.grid.tile(tile);
    const bool own = shape_of_tile.problem == shape.world_size - 1;
    if (tile % tiles_each == 0) offset_in_part = 0;
    plan.schedule.push_back(tile);
    plan.placement.segments.push_back({0, shape_of_tile.rows, plan.packed_size});
    plan.placement.first_segment[static_cast<std::size_t>(tile) + 1] = tile + 1;
    if (own) {
      for (std::int32_t d = 1; d < shape.world_size; ++d) {
        plan.gates.push_back({tile, d - 1, GatePoint::kFinish, 0, (d - 1) * count + offset_in_part});
      }
      if (shape_of_tile.col_begin == 0) {
        const auto first_piece = static_cast<std::int64_t>(plan.restore.pieces.size());
        const std::int64_t row = shape_of_tile.row_begin - shape.rank * shape.rows_per_rank;
        plan.restore.bands.push_back({row, shape_of_tile.rows, first_piece, 0});
      }
      plan.restore.pieces.push_back({shape_of_tile.col_begin, shape_of_tile.cols, plan.packed_size});
      ++plan.restore.bands.back().num_pieces;
    }
    plan.packed_size += shape_of_tile.size();
    offset_in_part += shape_of_tile.size();
  }
  for (std::int32_t d = 1; d <= shape.world_size; ++d)
    plan.groups.push_back({(d - 1) * tiles_each, tiles_each});
  for (std::int32_t d = 1; d < shape.world_size; ++d) {
    const Region arriving{BufferKind::kReceived, (d - 1) * count, count};
    plan.slices.push_back({peer_of(shape, -d), arriving});
    Transfer send;
    send.kind = TransferKind::kSend;
    send.trigger = {TriggerKind::kGroup, d - 1};
    send.channel = 2 * (d - 1);
    send.peer = peer_of(shape, d);
    send.source = {BufferKind::kPacked, (d - 1) * count, count};
    Transfer receive;
    receive.kind = TransferKind::kReceive;
    receive.channel = 2 * (d - 1) + 1;
    receive.peer = peer_of(shape, -d);
    receive.destination = arriving;
    receive.slice = d - 1;
    plan.transfers.push_back(send);
    plan.transfers.push_back(receive);
  }
  plan.received_size = (shape.world_size - 1) * count;
  return plan;
}

/// Rows of experts: problem i multiplies its rows with weight weights[i] of a stack.
inline OverlapPlan experts_plan(const HandMadeShape& shape, const std::vector<std::int64_t>& rows,
                                const std::vector<std::int64_t>& weights) {
  std::vector<Problem> problems;
  std::int64_t row = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    problems.push_back(
        {.row_begin = row, .rows = rows[i], .col_begin = 0, .cols = shape.n, .weight = weights[i]});
    row += rows[i];
  }
  OverlapPlan plan = plain_plan(shape, problems);
  for (std::int64_t tile = plan.grid.num_tiles() - 1; tile >= 0; --tile) plan.schedule.push_back(tile);
  plan.groups = {{0, plan.grid.num_tiles()}};
  return plan;
}

/// out = A · B^T on both of two ranks, of which each has two of four columns of A. The main loop begins with
/// the own ones. `summed`: rows of tiles are packed one by one, summed over the ranks, and restored.
inline OverlapPlan column_passes_plan(const HandMadeShape& shape, DType dtype, bool summed) {
  const std::int64_t rows = shape.rows_per_rank;
  HandMadeShape four_columns = shape;
  four_columns.k = 4;
  OverlapPlan plan =
      plain_plan(four_columns, {{.row_begin = 0, .rows = rows, .col_begin = 0, .cols = shape.n}});
  plan.dtype = dtype;
  const std::int32_t peer = 1 - shape.rank;
  plan.input_rows = rows;
  plan.input_cols = 2;
  plan.input_blocks = {{2 * shape.rank, 2, BufferKind::kInput, 0}, {2 * peer, 2, BufferKind::kReceived, 0}};
  plan.received_size = 2 * rows;
  plan.slices = {{peer, {BufferKind::kReceived, 0, 2 * rows}}};
  Transfer send;
  send.kind = TransferKind::kSend;
  send.channel = shape.rank;
  send.peer = peer;
  send.source = {BufferKind::kInput, 0, 2 * rows};
  Transfer receive;
  receive.kind = TransferKind::kReceive;
  receive.channel = peer;
  receive.peer = peer;
  receive.destination = plan.slices[0].region;
  receive.slice = 0;
  plan.transfers = {send, receive};
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    plan.schedule.push_back(t);
    plan.gates.push_back({t, 0, GatePoint::kStart, 2, 0});
  }
  plan.groups = {{0, plan.grid.num_tiles()}};
  if (!summed) return plan;
  // Row after row of the output, each cut where tiles are.
  const std::int64_t tile_cols = (shape.n + shape.tile - 1) / shape.tile;
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    const Tile& tile = plan.grid.tile(t);
    for (std::int64_t i = 0; i < tile.rows; ++i) {
      plan.placement.segments.push_back({i, 1, (tile.row_begin + i) * shape.n + tile.col_begin});
    }
    plan.placement.first_segment[static_cast<std::size_t>(t) + 1] = std::ssize(plan.placement.segments);
  }
  plan.packed_size = rows * shape.n;
  Transfer sum;
  sum.trigger = {TriggerKind::kGroup, 0};
  sum.channel = 2;
  sum.source = sum.destination = {BufferKind::kPacked, 0, plan.packed_size};
  plan.transfers.push_back(sum);
  plan.restore.source = BufferKind::kPacked;
  for (std::int64_t row = 0; row < rows; ++row) {
    plan.restore.bands.push_back({row, 1, row * tile_cols, tile_cols});
    for (std::int64_t t = 0; t < tile_cols; ++t) {
      const std::int64_t col = t * shape.tile;
      plan.restore.pieces.push_back({col, std::min(shape.tile, shape.n - col), row * shape.n + col});
    }
  }
  return plan;
}

}  // namespace flashoverlap::test

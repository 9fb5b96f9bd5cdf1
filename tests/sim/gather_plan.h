#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "flashoverlap/plan.h"

namespace flashoverlap::test {

/// All-gather + GEMM by direct messages: `rows` rows of A lie on each rank; every rank sends its own to each
/// other rank, r + 1 first, and computes its own rows first, then each other rank's after they have arrived.
/// Tiles are `rows` x `rows`, so each rank has `ranks` tiles on one unit. Send and receive are on channels of
/// their own, so that they meet.
inline OverlapPlan gather_plan(std::int32_t rank, std::int32_t ranks, std::int64_t rows, std::int64_t k) {
  OverlapPlan plan;
  plan.operation = "gather-gemm";
  plan.rank = rank;
  plan.world_size = ranks;
  plan.grid = TileGrid({{.rows = rows * ranks, .cols = rows}}, k, rows, rows);
  plan.output_rows = rows * ranks;
  plan.output_cols = rows;
  plan.groups = {{0, ranks}};
  plan.placement.first_segment.assign(static_cast<std::size_t>(ranks) + 1, 0);
  const auto region = [&](std::int32_t owner) {
    return Region{BufferKind::kInput, owner * rows * k, rows * k};
  };
  for (std::int32_t step = 0; step < ranks; ++step) {
    const std::int32_t source = (rank + ranks - step) % ranks;
    const std::int32_t target = (rank + step) % ranks;
    plan.schedule.push_back(source);
    if (step == 0) continue;
    const auto slice = static_cast<std::int64_t>(plan.slices.size());
    plan.slices.push_back({source, region(source)});
    plan.gates.push_back({.tile = source, .slice = slice});
    plan.transfers.push_back({.kind = TransferKind::kSend,
                              .trigger = {},
                              .channel = rank * ranks + target,
                              .peer = target,
                              .source = region(rank),
                              .destination = {},
                              .send_counts = {},
                              .receive_counts = {}});
    plan.transfers.push_back({.kind = TransferKind::kReceive,
                              .trigger = {},
                              .channel = source * ranks + rank,
                              .peer = source,
                              .source = {},
                              .destination = region(source),
                              .send_counts = {},
                              .receive_counts = {},
                              .slice = slice});
  }
  std::sort(plan.gates.begin(), plan.gates.end(),
            [](const Gate& a, const Gate& b) { return a.tile < b.tile; });
  return plan;
}

}  // namespace flashoverlap::test

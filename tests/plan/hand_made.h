#pragma once

#include <string>
#include <utility>
#include <vector>

#include "flashoverlap/plan.h"

/// Small plans of the kinds for which there are no builders yet, made by hand for two ranks: m = 4, n = 4, k
/// = 2, tiles 2x4.
namespace flashoverlap::test {

inline OverlapPlan empty_plan(std::string operation, std::int32_t rank, TileGrid grid,
                              std::int64_t output_rows) {
  OverlapPlan plan;
  plan.operation = std::move(operation);
  plan.rank = rank;
  plan.world_size = 2;
  plan.grid = std::move(grid);
  plan.placement.first_segment.assign(static_cast<std::size_t>(plan.grid.num_tiles() + 1), 0);
  plan.output_rows = output_rows;
  plan.output_cols = 4;
  plan.agreement = 7;
  return plan;
}

inline Transfer transfer(TransferKind kind, Trigger trigger, std::int32_t channel, std::int32_t peer,
                         Region source, Region destination, std::int64_t slice = -1) {
  Transfer t;
  t.kind = kind;
  t.trigger = trigger;
  t.channel = channel;
  t.peer = peer;
  t.source = source;
  t.destination = destination;
  t.slice = slice;
  return t;
}

/// All-gather + GEMM: each rank has two rows of A; its own tile comes first, the other's is gated by their
/// arrival.
inline std::vector<OverlapPlan> all_gather_gemm() {
  std::vector<OverlapPlan> plans;
  for (std::int32_t r = 0; r < 2; ++r) {
    const std::int32_t peer = 1 - r;
    OverlapPlan plan = empty_plan("all-gather-gemm", r, TileGrid({{.rows = 4, .cols = 4}}, 2, 2, 4), 4);
    plan.schedule = {r, peer};
    plan.groups = {{0, 2}};
    const Region own{BufferKind::kInput, r * 4, 4};
    const Region theirs{BufferKind::kInput, peer * 4, 4};
    plan.slices = {{peer, theirs}};
    plan.gates = {{.tile = peer, .slice = 0, .point = GatePoint::kStart}};
    plan.transfers = {
        transfer(TransferKind::kSend, {}, r, peer, own, {BufferKind::kInput, 0, 0}),
        transfer(TransferKind::kReceive, {}, peer, peer, {BufferKind::kInput, 0, 0}, theirs, 0)};
    plans.push_back(std::move(plan));
  }
  return plans;
}

/// GEMM + reduce-scatter without a tail: the peer's tile first, sent at once; the own tile's epilogue adds
/// what has come.
inline std::vector<OverlapPlan> tail_free_reduce_scatter() {
  std::vector<OverlapPlan> plans;
  for (std::int32_t r = 0; r < 2; ++r) {
    const std::int32_t peer = 1 - r;
    OverlapPlan plan =
        empty_plan("tail-free-reduce-scatter", r, TileGrid({{.rows = 4, .cols = 4}}, 2, 2, 4), 2);
    plan.schedule = {peer, r};
    plan.groups = {{0, 1}, {1, 1}};
    plan.placement.first_segment = {0, 1, 2};
    plan.placement.segments = {{0, 2, r == 0 ? 8 : 0}, {0, 2, r == 0 ? 0 : 8}};
    plan.packed_size = 16;
    plan.received_size = 8;
    plan.slices = {{peer, {BufferKind::kReceived, 0, 8}}};
    plan.gates = {{.tile = r, .slice = 0, .point = GatePoint::kFinish}};
    plan.transfers = {
        transfer(TransferKind::kReceive, {}, peer, peer, {}, {BufferKind::kReceived, 0, 8}, 0),
        transfer(TransferKind::kSend, {TriggerKind::kGroup, 0}, r, peer, {BufferKind::kPacked, 0, 8}, {})};
    plan.restore.bands = {{0, 2, 0, 1}};
    plan.restore.pieces = {{0, 4, 8}};
    plans.push_back(std::move(plan));
  }
  return plans;
}

/// Puts of an expert's rows into their owner's memory: two experts of two rows on each rank, the first row of
/// each goes to the peer, the second stays (a put to itself).
inline std::vector<OverlapPlan> put_to_owners() {
  std::vector<OverlapPlan> plans;
  for (std::int32_t r = 0; r < 2; ++r) {
    const std::int32_t peer = 1 - r;
    OverlapPlan plan = empty_plan(
        "expert-combine", r,
        TileGrid({{.rows = 2, .cols = 4}, {.row_begin = 2, .rows = 2, .cols = 4, .weight = 1}}, 2, 2, 4), 4);
    plan.schedule = {0, 1};
    plan.groups = {{0, 1}, {1, 1}};
    plan.placement.first_segment = {0, 2, 4};
    plan.placement.segments = {{0, 1, 0}, {1, 1, 4}, {0, 1, 8}, {1, 1, 12}};
    plan.packed_size = 16;
    plan.received_size = 16;
    // Slices 2e and 2e + 1: expert e of the peer, and of this rank.
    for (std::int64_t s = 0; s < 4; ++s)
      plan.slices.push_back({s % 2 == 0 ? peer : r, {BufferKind::kReceived, s * 4, 4}});
    for (std::int64_t e = 0; e < 2; ++e) {
      const Trigger done{TriggerKind::kGroup, e};
      for (std::int64_t own = 0; own < 2; ++own) {
        const std::int64_t s = 2 * e + own;
        plan.transfers.push_back(transfer(TransferKind::kPut, done, 0, own == 0 ? peer : r,
                                          {BufferKind::kPacked, s * 4, 4}, {BufferKind::kReceived, s * 4, 4},
                                          s));
      }
    }
    plan.restore.source = BufferKind::kReceived;
    for (std::int64_t row = 0; row < 4; ++row) {
      plan.restore.bands.push_back({row, 1, row, 1});
      plan.restore.pieces.push_back({0, 4, row * 4});
    }
    plans.push_back(std::move(plan));
  }
  return plans;
}

}  // namespace flashoverlap::test

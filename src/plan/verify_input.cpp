#include <algorithm>
#include <span>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify_ranks.h"

/// Input blocks: they make up A, tiles wait for those that arrive, and they hold what belongs there.
namespace flashoverlap::plan {
namespace {

using core::no;

/// One block with its place in the main loop.
struct PlacedBlock {
  std::size_t number = 0;
  InputBlock block;
  std::int64_t loop_begin = 0;
};

std::vector<PlacedBlock> place_blocks(const OverlapPlan& plan) {
  std::vector<PlacedBlock> placed;
  std::int64_t loop = 0;
  for (std::size_t b = 0; b < plan.input_blocks.size(); ++b) {
    placed.push_back({b, plan.input_blocks[b], loop});
    loop += plan.input_blocks[b].depth;
  }
  return placed;
}

Verdict check_block(const OverlapPlan& plan, const Facts& facts, std::size_t b) {
  const InputBlock& block = plan.input_blocks[b];
  const std::int64_t k = plan.grid.k();
  if (block.depth < 1 || block.k_begin < 0 || block.k_begin > k || block.depth > k - block.k_begin) {
    return no("input block {} has columns from {} on, {} of them; expected at least one inside [0, {})", b,
              block.k_begin, block.depth, k);
  }
  if (block.buffer != BufferKind::kInput && block.buffer != BufferKind::kReceived) {
    return no("input block {} is in the {} buffer; expected input or received", b, name_of(block.buffer));
  }
  const auto count = product(plan.grid.rows(), block.depth);
  if (!count) return no("input block {} is too large: {} x {}", b, plan.grid.rows(), block.depth);
  return check_region(facts, {block.buffer, block.offset, *count}, fmt::format("input block {}", b));
}

/// Slices of one buffer by offset.
struct SliceRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t slice = 0;
};

std::vector<SliceRange> slices_in(const OverlapPlan& plan, BufferKind buffer) {
  std::vector<SliceRange> ranges;
  for (std::int64_t s = 0; s < std::ssize(plan.slices); ++s) {
    const Region& region = plan.slices[index(s)].region;
    if (region.buffer != buffer || region.count == 0) continue;
    ranges.push_back({region.offset, region.offset + region.count, s});
  }
  std::ranges::sort(ranges, {}, &SliceRange::begin);
  return ranges;
}

/// Tile `t` reads its rows of one block.
Verdict check_tile_waits(const OverlapPlan& plan, std::int64_t t, std::span<const Gate> gates,
                         const PlacedBlock& placed, const std::vector<SliceRange>& slices) {
  const Tile& tile = plan.grid.tile(t);
  const InputBlock& block = placed.block;
  std::int64_t next = block.offset + tile.row_begin * block.depth;
  const std::int64_t end = next + tile.rows * block.depth;
  const auto nothing_arrives = [&] {
    return no(
        "tile {} reads element {} of the received buffer for input block {}, but no slice arrives there", t,
        next, placed.number);
  };
  const bool all_arrives = block.buffer == BufferKind::kReceived;
  auto it = std::ranges::partition_point(slices, [&](const SliceRange& s) { return s.end <= next; });
  for (; it != slices.end() && it->begin < end; ++it) {
    if (all_arrives && it->begin > next) return nothing_arrives();
    const bool waits = std::ranges::any_of(gates, [&](const Gate& gate) {
      return gate.point == GatePoint::kStart && gate.slice == it->slice && gate.k_begin <= placed.loop_begin;
    });
    if (!waits) {
      return no(
          "tile {} reads input block {} from element {} of the main loop on, but has no start gate that "
          "waits "
          "there for slice {}",
          t, placed.number, placed.loop_begin, it->slice);
    }
    next = it->end;
  }
  return all_arrives && next < end ? nothing_arrives() : Verdict{};
}

/// Where rank r's rows of a block's columns begin in the input buffer of the rank that has them, whose first
/// column is `first_column`. Where that rank's columns are several blocks, its buffer holds one after the
/// other, each dense with the rows of all ranks.
std::int64_t input_element(const InputBlock& block, std::span<const std::int64_t> rows, std::size_t r,
                           std::int64_t first_column) {
  return rows.back() * (block.k_begin - first_column) + rows[r] * block.depth;
}

/// Elements of a rank's received buffer and where they come from, against one of its input blocks.
Verdict check_block_origin(Plans plans, std::size_t r, const PlacedBlock& placed, const Arrival& arrival,
                           std::span<const std::int64_t> rows, std::span<const std::int64_t> columns) {
  const InputBlock& block = placed.block;
  const std::int64_t end = block.offset + plans[r].grid.rows() * block.depth;
  if (arrival.end <= block.offset || arrival.begin >= end) return {};
  const std::size_t s = arrival.source;
  if (block.k_begin < columns[s] || block.k_begin + block.depth > columns[s + 1]) {
    return no("rank {}: input block {} has columns [{}, {}), but rank {} sends columns [{}, {}) there", r,
              placed.number, block.k_begin, block.k_begin + block.depth, s, columns[s], columns[s + 1]);
  }
  const std::int64_t expected = input_element(block, rows, r, columns[s]) + arrival.begin - block.offset;
  if (arrival.offset == expected) return {};
  return no("rank {}: input block {} takes element {} of rank {}'s input at element {}; expected element {}",
            r, placed.number, arrival.offset, s, arrival.begin, expected);
}

}  // namespace

Verdict check_input_blocks(const OverlapPlan& plan, const Facts& facts) {
  if (plan.input_blocks.empty()) {
    if (plan.input_rows == 0 && plan.input_cols == 0) return {};
    return no("there are no input blocks, but the input buffer is said to hold {} x {}", plan.input_rows,
              plan.input_cols);
  }
  for (std::size_t b = 0; b < plan.input_blocks.size(); ++b) {
    if (Verdict v = check_block(plan, facts, b); !v) return v;
  }
  std::vector<InputBlock> by_column = plan.input_blocks;
  std::ranges::sort(by_column, {}, &InputBlock::k_begin);
  std::int64_t next = 0;
  for (const InputBlock& block : by_column) {
    if (block.k_begin != next) {
      return no("input blocks: columns of A are taken up to {}, and next from {} on; expected each once",
                next, block.k_begin);
    }
    next += block.depth;
  }
  if (next == plan.grid.k()) return {};
  return no("input blocks: columns [{}, {}) of A are in none", next, plan.grid.k());
}

Verdict check_input_waits(const OverlapPlan& plan, const Facts&) {
  if (plan.input_blocks.empty()) return {};
  const auto input = slices_in(plan, BufferKind::kInput);
  const auto received = slices_in(plan, BufferKind::kReceived);
  const std::vector<PlacedBlock> blocks = place_blocks(plan);
  std::size_t next = 0;
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    const std::size_t first = next;
    while (next < plan.gates.size() && plan.gates[next].tile == t) ++next;
    const std::span<const Gate> gates = std::span(plan.gates).subspan(first, next - first);
    for (const PlacedBlock& block : blocks) {
      const auto& slices = block.block.buffer == BufferKind::kInput ? input : received;
      if (Verdict v = check_tile_waits(plan, t, gates, block, slices); !v) return v;
    }
  }
  return {};
}

Verdict check_input_origins(Plans plans, const Matching& matching) {
  // What rows and columns mean is part of the operation: both are spread over the ranks in order.
  if (plans.front().operation != "all-to-all-gemm") return {};
  std::vector<std::int64_t> rows{0};
  std::vector<std::int64_t> columns{0};
  for (const OverlapPlan& plan : plans) {
    rows.push_back(rows.back() + plan.grid.rows());
    columns.push_back(columns.back() + plan.input_cols);
  }
  const auto arrivals = arrivals_from(plans, matching, BufferKind::kInput);
  for (std::size_t r = 0; r < plans.size(); ++r) {
    const std::int64_t k = plans[r].grid.k();
    if (plans[r].grid.rows() > 0 && !plans[r].input_blocks.empty() && columns.back() != k) {
      return no("rank {}: the main loop has {} elements, but the inputs of all ranks have {} columns", r, k,
                columns.back());
    }
    for (const PlacedBlock& placed : place_blocks(plans[r])) {
      const InputBlock& block = placed.block;
      if (block.buffer == BufferKind::kInput) {
        const bool inside = block.k_begin >= columns[r] && block.k_begin + block.depth <= columns[r + 1];
        const std::int64_t offset = input_element(block, rows, r, columns[r]);
        if (inside && block.offset == offset) continue;
        return no(
            "rank {}: input block {} has columns [{}, {}), from element {} of the input buffer on; expected "
            "inside [{}, {}), from element {} on",
            r, placed.number, block.k_begin, block.k_begin + block.depth, block.offset, columns[r],
            columns[r + 1], offset);
      }
      for (const Arrival& arrival : arrivals[r]) {
        if (Verdict v = check_block_origin(plans, r, placed, arrival, rows, columns); !v) return v;
      }
    }
  }
  return {};
}

}  // namespace flashoverlap::plan

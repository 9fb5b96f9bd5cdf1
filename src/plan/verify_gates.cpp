#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify.h"

/// Gates are in range, and no tile reads an input that arrives without waiting for it.
namespace flashoverlap::plan {
namespace {

using core::no;

std::string describe_gate(const OverlapPlan& plan, std::int64_t g) {
  const Gate& gate = plan.gates[index(g)];
  return fmt::format("gate {} (tile {} {} after slice {})", g, gate.tile,
                     gate.point == GatePoint::kStart ? "starts" : "finishes", gate.slice);
}

Verdict check_start(const OverlapPlan& plan, std::int64_t g) {
  const Gate& gate = plan.gates[index(g)];
  const BufferKind buffer = plan.slices[index(gate.slice)].region.buffer;
  const bool read_at_start = buffer == BufferKind::kInput || buffer == BufferKind::kWeight ||
                             (buffer == BufferKind::kReceived && !plan.input_blocks.empty());
  if (!read_at_start) {
    return no("{}, but that slice arrives in the {} buffer, which no tile reads at its start",
              describe_gate(plan, g), name_of(buffer));
  }
  if (gate.k_begin < 0 || gate.k_begin > plan.grid.k()) {
    return no("{} has k_begin {}, which is not in [0, {}]", describe_gate(plan, g), gate.k_begin,
              plan.grid.k());
  }
  return {};
}

Verdict check_finish(const OverlapPlan& plan, std::int64_t g) {
  const Gate& gate = plan.gates[index(g)];
  const Region& slice = plan.slices[index(gate.slice)].region;
  const std::int64_t size = plan.grid.tile(gate.tile).size();
  if (slice.buffer != BufferKind::kReceived) {
    return no("{}, but that slice arrives in the {} buffer; expected the received buffer",
              describe_gate(plan, g), name_of(slice.buffer));
  }
  if (gate.offset < slice.offset || size > slice.count || gate.offset - slice.offset > slice.count - size) {
    return no("{} adds {} elements at offset {}, outside the slice, which is {}", describe_gate(plan, g),
              size, gate.offset, describe(slice));
  }
  return {};
}

/// A slice seen as consecutive rows of A or B, each k long; the first may be cut on the left.
struct SliceRows {
  std::int64_t slice = 0;
  std::int64_t first_row = 0;
  std::int64_t end_row = 0;
  std::int64_t first_k = 0;  ///< Where it begins in its first row.
};

std::vector<SliceRows> rows_of_slices(const OverlapPlan& plan, BufferKind buffer) {
  std::vector<SliceRows> rows;
  const std::int64_t k = plan.grid.k();
  for (std::int64_t s = 0; s < std::ssize(plan.slices); ++s) {
    const Region& region = plan.slices[index(s)].region;
    if (region.buffer != buffer || region.count == 0) continue;
    rows.push_back({s, region.offset / k, (region.offset + region.count - 1) / k + 1, region.offset % k});
  }
  return rows;
}

/// Tile `t` reads rows [begin, end) of the buffer that `slices` are in; `gates` are the tile's.
Verdict check_waits(std::int64_t t, std::span<const Gate> gates, const std::vector<SliceRows>& slices,
                    std::int64_t begin, std::int64_t end, BufferKind buffer) {
  for (const SliceRows& slice : slices) {
    const std::int64_t first = std::max(begin, slice.first_row);
    const std::int64_t last = std::min(end, slice.end_row);
    if (first >= last) continue;
    const bool only_first_row = first == slice.first_row && last == first + 1;
    const std::int64_t k = only_first_row ? slice.first_k : 0;
    const bool waits = std::ranges::any_of(gates, [&](const Gate& gate) {
      return gate.point == GatePoint::kStart && gate.slice == slice.slice && gate.k_begin <= k;
    });
    if (!waits) {
      return no(
          "tile {} reads rows [{}, {}) of the {} buffer from k {} on, but has no start gate that waits there "
          "for "
          "slice {}",
          t, first, last, name_of(buffer), k, slice.slice);
    }
  }
  return {};
}

Verdict check_all_wait(const OverlapPlan& plan) {
  // Input blocks have a check of their own.
  const auto input =
      plan.input_blocks.empty() ? rows_of_slices(plan, BufferKind::kInput) : std::vector<SliceRows>{};
  const auto weight = rows_of_slices(plan, BufferKind::kWeight);
  if (input.empty() && weight.empty()) return {};
  std::size_t next = 0;
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    const std::size_t first = next;
    while (next < plan.gates.size() && plan.gates[next].tile == t) ++next;
    const std::span<const Gate> gates = std::span(plan.gates).subspan(first, next - first);
    const Tile& tile = plan.grid.tile(t);
    const std::int64_t end = tile.row_begin + tile.rows;
    if (Verdict v = check_waits(t, gates, input, tile.row_begin, end, BufferKind::kInput); !v) return v;
    // Slices are inside their buffers, so where there is one in the weights their size did fit.
    if (weight.empty()) continue;
    const std::int64_t row =
        plan.grid.problems()[index(tile.problem)].weight * plan.grid.cols() + tile.col_begin;
    if (Verdict v = check_waits(t, gates, weight, row, row + tile.cols, BufferKind::kWeight); !v) return v;
  }
  return {};
}

/// A received tile is added once.
Verdict check_added_once(const OverlapPlan& plan) {
  std::vector<std::int64_t> finish;
  for (std::int64_t g = 0; g < std::ssize(plan.gates); ++g) {
    if (plan.gates[index(g)].point == GatePoint::kFinish) finish.push_back(g);
  }
  std::ranges::sort(finish, {}, [&](std::int64_t g) { return plan.gates[index(g)].offset; });
  for (std::size_t i = 1; i < finish.size(); ++i) {
    const Gate& a = plan.gates[index(finish[i - 1])];
    const Gate& b = plan.gates[index(finish[i])];
    if (b.offset < a.offset + plan.grid.tile(a.tile).size()) {
      return no("{} and {} both add element {} of the received buffer", describe_gate(plan, finish[i - 1]),
                describe_gate(plan, finish[i]), b.offset);
    }
  }
  return {};
}

}  // namespace

Verdict check_gates(const OverlapPlan& plan, const Facts&) {
  for (std::int64_t g = 0; g < std::ssize(plan.gates); ++g) {
    const Gate& gate = plan.gates[index(g)];
    if (gate.tile < 0 || gate.tile >= plan.grid.num_tiles()) {
      return no("gate {} holds tile {}, which is not in [0, {})", g, gate.tile, plan.grid.num_tiles());
    }
    if (g > 0 && gate.tile < plan.gates[index(g - 1)].tile) {
      return no("gates are not sorted by tile: gate {} holds tile {}, gate {} tile {}", g - 1,
                plan.gates[index(g - 1)].tile, g, gate.tile);
    }
    if (gate.slice < 0 || gate.slice >= std::ssize(plan.slices)) {
      return no("gate {} of tile {} waits for slice {}, which is not in [0, {})", g, gate.tile, gate.slice,
                plan.slices.size());
    }
    if (Verdict v = gate.point == GatePoint::kStart ? check_start(plan, g) : check_finish(plan, g); !v)
      return v;
  }
  if (Verdict v = check_all_wait(plan); !v) return v;
  return check_added_once(plan);
}

}  // namespace flashoverlap::plan

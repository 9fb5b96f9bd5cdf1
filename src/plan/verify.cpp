#include "plan/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/fail.h"
#include "plan/arithmetic.h"

namespace flashoverlap {
namespace plan {
namespace {

using core::no;

/// Elements of A and B as far as the grid says; saturated, as no buffer of that size can exist.
std::int64_t saturated(std::int64_t a, std::int64_t b) {
  return product(a, b).value_or(std::numeric_limits<std::int64_t>::max());
}

Verdict check_problems_disjoint(const OverlapPlan& plan) {
  const auto& problems = plan.grid.problems();
  std::vector<std::int64_t> by_row;
  for (std::int64_t i = 0; i < std::ssize(problems); ++i) {
    if (problems[index(i)].rows > 0 && problems[index(i)].cols > 0) by_row.push_back(i);
  }
  std::ranges::sort(by_row, {}, [&](std::int64_t i) { return problems[index(i)].row_begin; });
  for (std::size_t i = 0; i < by_row.size(); ++i) {
    const Problem& a = problems[index(by_row[i])];
    for (std::size_t j = i + 1; j < by_row.size(); ++j) {
      const Problem& b = problems[index(by_row[j])];
      if (b.row_begin >= a.row_begin + a.rows) break;
      if (b.col_begin < a.col_begin + a.cols && a.col_begin < b.col_begin + b.cols) {
        return no("problems {} and {} of the grid overlap at row {}, column {}", by_row[i], by_row[j],
                  b.row_begin, std::max(a.col_begin, b.col_begin));
      }
    }
  }
  return {};
}

}  // namespace

std::string describe(const Region& region) {
  return fmt::format("elements [{}, {}) of the {} buffer", region.offset, region.offset + region.count,
                     name_of(region.buffer));
}

std::string describe(const Transfer& t) {
  std::string text(name_of(t.kind));
  if (t.kind == TransferKind::kSend || t.kind == TransferKind::kPut)
    text += fmt::format(" to rank {}", t.peer);
  if (t.kind == TransferKind::kReceive) text += fmt::format(" from rank {}", t.peer);
  if (t.trigger.kind == TriggerKind::kGroup) text += fmt::format(" after group {}", t.trigger.index);
  if (t.trigger.kind == TriggerKind::kSlice) text += fmt::format(" after slice {}", t.trigger.index);
  if (t.trigger.kind == TriggerKind::kStart) text += " at the start";
  return text;
}

std::string describe(const OverlapPlan& plan, std::int64_t transfer) {
  return fmt::format("transfer {} ({})", transfer, describe(plan.transfers[index(transfer)]));
}

std::string describe(const OverlapPlan& plan, const Incoming& incoming) {
  if (incoming.transfer >= 0) return describe(plan, incoming.transfer);
  return fmt::format("the put of slice {} by rank {}", incoming.slice,
                     plan.slices[index(incoming.slice)].source);
}

Verdict check_region(const Facts& facts, const Region& region, const std::string& what) {
  const auto buffer = static_cast<std::size_t>(region.buffer);
  if (buffer >= facts.buffer_size.size()) return no("{} is in buffer {}, which does not exist", what, buffer);
  const std::int64_t size = facts.buffer_size[buffer];
  if (region.offset < 0 || region.count < 0 || region.count > size || region.offset > size - region.count) {
    return no("{} has offset {} and count {}, outside the {} buffer of {} elements", what, region.offset,
              region.count, name_of(region.buffer), size);
  }
  return {};
}

Origin origin_of(const OverlapPlan& plan, const Facts& facts, std::int64_t packed_offset) {
  const auto after = std::ranges::upper_bound(facts.packed, packed_offset, {}, &PackedPiece::begin);
  const PackedPiece& piece = *(after - 1);
  const Tile& tile = plan.grid.tile(piece.tile);
  const PlacementSegment& segment = plan.placement.segments[index(piece.segment)];
  const std::int64_t row = (packed_offset - piece.begin) / tile.cols;
  return {piece.tile, tile.row_begin + segment.row_begin + row,
          tile.col_begin + (packed_offset - piece.begin) % tile.cols, segment.rows - row};
}

Verdict check_header(const OverlapPlan& plan, Facts& facts) {
  if (plan.world_size < 1) return no("world_size must be at least 1, got {}", plan.world_size);
  if (plan.rank < 0 || plan.rank >= plan.world_size)
    return no("rank {} is not in [0, {})", plan.rank, plan.world_size);
  if (static_cast<std::size_t>(plan.dtype) > static_cast<std::size_t>(DType::kFloat16)) {
    return no("dtype {} is not known", static_cast<std::size_t>(plan.dtype));
  }
  if (plan.resources.compute_units < 1) {
    return no("compute_units must be at least 1, got {}", plan.resources.compute_units);
  }
  if (plan.resources.communication_units < 0) {
    return no("communication_units must be at least 0, got {}", plan.resources.communication_units);
  }
  if (plan.packed_size < 0) return no("packed_size must be at least 0, got {}", plan.packed_size);
  if (plan.received_size < 0) return no("received_size must be at least 0, got {}", plan.received_size);
  if (plan.output_rows < 0 || plan.output_cols < 0 || !product(plan.output_rows, plan.output_cols)) {
    return no("the output of {} x {} is not a matrix of at most 2^63 elements", plan.output_rows,
              plan.output_cols);
  }
  constexpr std::int64_t kMaxShift = std::int64_t{1} << 62U;
  for (const std::int64_t shift : {plan.output_row_shift, plan.output_col_shift}) {
    if (shift < -kMaxShift || shift > kMaxShift) return no("an output shift of {} fits no matrix", shift);
  }
  std::int64_t weights = 0;
  for (const Problem& problem : plan.grid.problems())
    weights = std::max(weights, sum(problem.weight, 1).value_or(0));
  if (plan.input_rows < 0 || plan.input_cols < 0) {
    return no("the input buffer of {} x {} is not a matrix", plan.input_rows, plan.input_cols);
  }
  facts.buffer_size = {plan.input_blocks.empty() ? saturated(plan.grid.rows(), plan.grid.k())
                                                 : saturated(plan.input_rows, plan.input_cols),
                       saturated(weights, saturated(plan.grid.cols(), plan.grid.k())), plan.packed_size,
                       plan.received_size, plan.output_rows * plan.output_cols};
  return check_problems_disjoint(plan);
}

Verdict verify_one(const OverlapPlan& plan, Facts& facts) {
  if (Verdict v = check_header(plan, facts); !v) return v;
  if (Verdict v = check_input_blocks(plan, facts); !v) return v;
  if (Verdict v = check_schedule(plan); !v) return v;
  if (Verdict v = check_groups(plan, facts); !v) return v;
  if (Verdict v = check_placement(plan, facts); !v) return v;
  if (Verdict v = check_slices(plan, facts); !v) return v;
  if (Verdict v = check_transfers(plan, facts); !v) return v;
  if (Verdict v = check_incoming(plan, facts); !v) return v;
  if (Verdict v = check_order(plan, facts); !v) return v;
  if (Verdict v = check_gates(plan, facts); !v) return v;
  if (Verdict v = check_input_waits(plan, facts); !v) return v;
  if (Verdict v = check_output(plan, facts); !v) return v;
  return check_restore(plan, facts);
}

}  // namespace plan

Verdict verify(const OverlapPlan& plan) {
  plan::Facts facts;
  return plan::verify_one(plan, facts);
}

}  // namespace flashoverlap

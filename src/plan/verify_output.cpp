#include <algorithm>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify.h"

/// An output that is not restored is written in place, as a whole and once.
namespace flashoverlap::plan {
namespace {

using core::no;

bool reduces(const OverlapPlan& plan, const Incoming& in) {
  if (in.transfer < 0) return false;
  const TransferKind kind = plan.transfers[index(in.transfer)].kind;
  return kind == TransferKind::kAllReduce || kind == TransferKind::kReduceScatter;
}

/// Elements of the output that this adds to what tiles write: all but a reduction's, and but an all-gather's
/// own chunk.
std::int64_t fresh_elements(const OverlapPlan& plan, const Incoming& in) {
  if (in.buffer != BufferKind::kOutput || reduces(plan, in)) return 0;
  if (in.transfer >= 0 && plan.transfers[index(in.transfer)].kind == TransferKind::kAllGather) {
    return in.end - in.begin - plan.transfers[index(in.transfer)].source.count;
  }
  return in.end - in.begin;
}

Verdict check_in_place_tile(const OverlapPlan& plan, std::int64_t t) {
  const Tile& tile = plan.grid.tile(t);
  const std::int64_t row = tile.row_begin + plan.output_row_shift;
  const std::int64_t col = tile.col_begin + plan.output_col_shift;
  if (row < 0 || row + tile.rows > plan.output_rows || col < 0 || col + tile.cols > plan.output_cols) {
    return no("tile {} is written in place at rows [{}, {}), columns [{}, {}), outside the output of {} x {}",
              t, row, row + tile.rows, col, col + tile.cols, plan.output_rows, plan.output_cols);
  }
  return {};
}

/// Where a reduce-scatter is the operation, a tile that stays must have added one part from each other rank.
Verdict check_all_added(const OverlapPlan& plan, std::int64_t t) {
  if (plan.operation != "gemm-reduce-scatter" || plan.world_size == 1) return {};
  std::vector<bool> added(index(plan.world_size), false);
  added[index(plan.rank)] = true;
  auto gate = std::ranges::lower_bound(plan.gates, t, {}, &Gate::tile);
  for (; gate != plan.gates.end() && gate->tile == t; ++gate) {
    if (gate->point == GatePoint::kFinish) added[index(plan.slices[index(gate->slice)].source)] = true;
  }
  const auto missing = std::ranges::find(added, false);
  if (missing == added.end()) return {};
  return no("tile {} stays here, but no finish gate adds what rank {} has of it", t, missing - added.begin());
}

/// Where an all-reduce is the operation, a tile that misses it would be left with this rank's part of the sum
/// alone.
Verdict check_all_reduced(const OverlapPlan& plan, const Facts& facts, std::int64_t written) {
  if (plan.operation != "gemm-all-reduce" || plan.world_size == 1) return {};
  std::int64_t reduced = 0;
  for (const Incoming& in : facts.incoming) {
    if (in.buffer == BufferKind::kOutput && reduces(plan, in)) reduced += in.end - in.begin;
  }
  if (reduced == written) return {};
  return no("tiles write {} elements of the output in place, but transfers reduce only {} of them", written,
            reduced);
}

}  // namespace

Verdict check_output(const OverlapPlan& plan, const Facts& facts) {
  // Problems do not overlap and neither does what arrives, so sizes tell whether all is covered.
  std::int64_t written = 0;
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    if (!plan.placement.of_tile(t).empty()) continue;
    if (Verdict v = check_in_place_tile(plan, t); !v) return v;
    if (Verdict v = check_all_added(plan, t); !v) return v;
    written += plan.grid.tile(t).size();
  }
  if (Verdict v = check_all_reduced(plan, facts, written); !v) return v;
  std::int64_t arriving = 0;
  for (const Incoming& in : facts.incoming) {
    const std::int64_t fresh = fresh_elements(plan, in);
    if (fresh > 0 && !plan.restore.bands.empty()) {
      return no("{} writes into the output, but the restore overwrites it", describe(plan, in));
    }
    arriving += fresh;
  }
  const std::int64_t size = plan.output_rows * plan.output_cols;
  if (plan.restore.bands.empty() && written + arriving != size) {
    return no(
        "there is no restore, but of {} x {} = {} elements of the output tiles write {} and transfers {}",
        plan.output_rows, plan.output_cols, size, written, arriving);
  }
  return {};
}

}  // namespace flashoverlap::plan

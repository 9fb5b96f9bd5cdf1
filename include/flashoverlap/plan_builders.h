#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flashoverlap/plan.h"

/// Makes overlap plans from a problem and a partition. Every plan made here passes `verify`.
namespace flashoverlap {

/// Which rows of the sum a rank keeps after a reduce-scatter.
enum class RowOwnership {
  kContiguous,   ///< Rank r keeps rows [r * m / W, (r + 1) * m / W): what frameworks mean by reduce-scatter.
  kBlockCyclic,  ///< Each tile is cut into W row slabs and rank r keeps slab r of each (arXiv 2504.19519,
                 ///< "subtile").
};

[[nodiscard]] std::string_view name_of(RowOwnership rows);  ///< "contiguous", "block-cyclic"

/// What all builders need. All ranks of one call must pass equal values, `rank` apart.
struct PlanOptions {
  std::int32_t rank = 0;
  std::int32_t world_size = 1;  ///< >= 1.
  DType dtype = DType::kFloat32;
  std::int64_t m = 0;  ///< Rows of A and D, >= 0.
  std::int64_t n = 0;  ///< Columns of D, rows of B, >= 0.
  std::int64_t k = 0;  ///< Columns of A and B, >= 0; with k = 0 the product is all zeros.
  std::int64_t tile_m = 128;
  std::int64_t tile_n = 128;
  /// Tile rows that are walked together, column by column (CUTLASS's threadblock swizzle). 1: plain row-major
  /// order.
  std::int64_t swizzle = 1;
  Resources resources;
  /// Waves per group; must consist of positive numbers that sum to num_waves(options). Empty:
  /// default_partition.
  std::vector<std::int64_t> partition;
};

/// Waves of the plan that these options lead to, for a given m (all-to-all: of the rank with the most rows).
/// With contiguous ownership tiles are cut at the owners' boundaries, so there may be more.
[[nodiscard]] std::int64_t num_waves(const PlanOptions& options);
[[nodiscard]] std::int64_t num_waves_reduce_scatter(const PlanOptions& options, RowOwnership rows);

/// A partition that is reasonable without any measurement: at most 8 groups of nearly equal size, the last
/// one wave. The tuner finds better ones. Empty for 0 waves.
[[nodiscard]] std::vector<std::int64_t> default_partition(std::int64_t waves);

/// Tile order with swizzle: column by column inside bands of `swizzle` tile rows (the last band may be
/// lower).
[[nodiscard]] std::vector<std::int64_t> swizzled_order(std::int64_t tile_rows, std::int64_t tile_cols,
                                                       std::int64_t swizzle);

/// GEMM + all-reduce: D = sum over ranks of A_r · B_r^T, [m, n] on every rank. Whole tiles are packed in
/// schedule order (arXiv 2504.19519, section 4: reordering unit tile). World size 1 has no transfers and
/// writes in place. A partition of one group needs no packing either: tiles are written in place and the
/// all-reduce works on the output. That is the plan of "no overlap". Throws Error(kBadArgument) naming the
/// option and what it must be.
[[nodiscard]] OverlapPlan plan_all_reduce(const PlanOptions& options);

/// GEMM + reduce-scatter: rank r gets its rows of the sum, [owned rows, n]. Contiguous ownership schedules
/// tiles of all owners in turn, so that each group holds about an equal share for each rank; block-cyclic
/// cuts every tile into slabs. m need not be a multiple of the world size: shares then differ by a row and
/// the transfers carry counts.
[[nodiscard]] OverlapPlan plan_reduce_scatter(const PlanOptions& options, RowOwnership rows);

/// Global row of each output row of `rank` after a reduce-scatter, ascending. Size: the rank's output rows.
[[nodiscard]] std::vector<std::int64_t> owned_rows(std::int64_t m, std::int64_t tile_m,
                                                   std::int32_t world_size, std::int32_t rank,
                                                   RowOwnership rows);

/// Where each row of each rank's product goes: destinations[r][i] is the rank that receives row i of rank r's
/// D.
struct Routing {
  std::vector<std::vector<std::int32_t>> destinations;
  /// Rows that `rank` receives from `source`.
  [[nodiscard]] std::int64_t rows(std::int32_t source, std::int32_t rank) const;
};

/// GEMM + all-to-all: rank d gets all rows routed to it, ordered by source rank and then by row: [received
/// rows, n]. `options.m` is ignored: rank r's m is routing.destinations[r].size(), and may differ between
/// ranks, or be 0. A rank with fewer waves than the one with the most splits its own waves in the same
/// proportions, so that all ranks have equally many groups; some may be empty. Reordering unit: the rows of a
/// tile ("subtoken", arXiv 2504.19519).
[[nodiscard]] OverlapPlan plan_all_to_all(const PlanOptions& options, const Routing& routing);

}  // namespace flashoverlap

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

/// The same where small transfers do not pay: every group has at least `min_group_bytes` of the `bytes` that
/// all waves send, as if all waves sent equally much; the last group is the smallest that has. One group
/// where there is not enough for two. Throws Error(kBadArgument) for negative numbers.
[[nodiscard]] std::vector<std::int64_t> default_partition(std::int64_t waves, std::int64_t bytes,
                                                          std::int64_t min_group_bytes);

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

/// How one axis of a matrix is spread over the ranks, and how finely its slices travel.
struct SliceOptions {
  /// Rows (or columns) of each rank's slice, >= 0; as many as ranks, and they sum to the axis' size. Empty:
  /// nearly equal, rank r has [r * size / W, (r + 1) * size / W).
  std::vector<std::int64_t> sizes = {};
  /// Transfers that each slice is cut into, at tile boundaries, as far as it has so many tiles. Finer slices
  /// pay where communication takes longer than computation. 0: as few as leave no tail where it takes no
  /// longer; operators whose context has a tuner that knows the machine ask it (slice_choice.h).
  std::int64_t parts = 0;
  /// Slices that a rank may be sending at a time, each to another rank. They share its link, so more do not
  /// bring more bandwidth, but what a message takes besides (its latency) passes while another one is on the
  /// wire: pays where slices are so small that latencies are much of a transfer, as with many ranks. 0: 2
  /// where slices leave as they are computed; 1 where all of them are there at the start, since two that
  /// share the link arrive later than the first of them would alone; a tuner is asked as for `parts`.
  std::int64_t send_channels = 0;
  bool operator==(const SliceOptions&) const = default;
};

/// What the ranks' slices are cut along.
enum class SliceAxis {
  kRows,     ///< Rows of A and of the product: activations, TP with sequence parallelism.
  kColumns,  ///< Rows of B, columns of the product: a weight, DP.
};

[[nodiscard]] std::string_view name_of(SliceAxis axis);  ///< "rows", "columns"

/// The begin of each rank's slice and the end of the last: world size + 1 numbers. Throws Error(kBadArgument)
/// when the sizes do not hold.
[[nodiscard]] std::vector<std::int64_t> slice_begins(const SliceOptions& slices, std::int64_t size,
                                                     std::int32_t world_size);

/// All-gather + GEMM without a tail (arXiv 2604.24013): D = A · B^T, [m, n] on every rank, where rank r has
/// slice r of A's rows (kRows) or of B's (kColumns) at the start, at its place in the whole matrix; the rest
/// of that matrix arrives there. The own slice's tiles come first in the schedule, then slices in their order
/// of arrival, each gated: from rank r - 1, r - 2, … Every rank sends to r + 1, r + 2, … in turn, so that no
/// two load the same link at once. `options.partition` must be empty: slices take its place.
[[nodiscard]] OverlapPlan plan_all_gather_gemm(const PlanOptions& options, const SliceOptions& slices,
                                               SliceAxis axis = SliceAxis::kRows);

/// The slicing baseline: slices of all ranks cut into `num_slices` nearly equal pieces, piece i of all ranks
/// gathered by collective i, its tiles gated by it. 1: nothing is overlapped. With more, the gathered matrix
/// (and with kRows the product) has its rows in the order of arrival: `sliced_rows` tells which. Same tiles,
/// and so the same bits, when the pieces end at tile boundaries.
[[nodiscard]] OverlapPlan plan_sliced_all_gather_gemm(const PlanOptions& options, const SliceOptions& slices,
                                                      std::int64_t num_slices,
                                                      SliceAxis axis = SliceAxis::kRows);

/// For each row of the gathered matrix of plan_sliced_all_gather_gemm its row in the whole one. `tile`: the
/// tile's size along the axis.
[[nodiscard]] std::vector<std::int64_t> sliced_rows(const SliceOptions& slices, std::int64_t size,
                                                    std::int32_t world_size, std::int64_t tile,
                                                    std::int64_t num_slices);

/// GEMM + reduce-scatter without a tail (arXiv 2604.24013): rank r keeps slice r of the rows of the sum over
/// ranks, [rows of slice r, n]. Slices of ranks r + 1, r + 2, … come first and go to their owners as soon as
/// they are complete, the own slice comes last and its epilogue adds what has arrived. The slice that is sent
/// last is cut in two, since the own slice's first tiles would wait for the whole of it.
/// `options.partition` must be empty.
[[nodiscard]] OverlapPlan plan_tail_free_reduce_scatter(const PlanOptions& options,
                                                        const SliceOptions& slices);

/// plan_reduce_scatter with contiguous rows of any sizes; `slices.parts` is not used. The baseline of the
/// tail-free one, with the same tiles and the same bits: one group overlaps nothing, k equal groups are the
/// slicing baseline.
[[nodiscard]] OverlapPlan plan_reduce_scatter(const PlanOptions& options, const SliceOptions& slices);
[[nodiscard]] std::int64_t num_waves_reduce_scatter(const PlanOptions& options, const SliceOptions& slices);

/// The two ways in which Ulysses spreads attention over ranks (arXiv 2309.14509): by tokens (rows) outside
/// attention, by heads (columns) inside.
struct HeadSlices {
  SliceOptions rows;     ///< Tokens of each rank, in all options.m.
  SliceOptions columns;  ///< Columns of each rank's heads, in all options.n (before attention) or k (after).
};

/// GEMM + all-to-all along heads (QKV projection): rank r has its tokens' rows of A, [rows of r, k], and all
/// of B; rank d gets its heads' columns of all tokens, [options.m, columns of d]. Columns of ranks r + 1, …
/// come first and are sent when complete, straight to their place in the output; the own ones come last.
/// `options.m`: tokens of all ranks together.
[[nodiscard]] OverlapPlan plan_gemm_all_to_all(const PlanOptions& options, const HeadSlices& slices);
/// The same by one all-to-all at the end: the baseline.
[[nodiscard]] OverlapPlan plan_serial_gemm_all_to_all(const PlanOptions& options, const HeadSlices& slices);
/// The slicing baseline: each rank's rows in `num_slices` nearly equal pieces, an all-to-all for each. The
/// output has its rows in the order of arrival: `sliced_rows` of `slices.rows` and options.m tells which.
[[nodiscard]] OverlapPlan plan_sliced_gemm_all_to_all(const PlanOptions& options, const HeadSlices& slices,
                                                      std::int64_t num_slices);

/// All-to-all along heads + GEMM (output projection): rank s has its heads' columns of all tokens,
/// [options.m, columns of s], as attention leaves them, and all of B; rank d gets its tokens' rows of the
/// product, [rows of d, n]. Its main loop begins with its own heads' columns and goes on with those of ranks
/// d - 1, d - 2, … as they arrive (`OverlapPlan::input_blocks`, `passes`), so that no rank waits at the start
/// or sends at the end. Every rank sends to r + 1, r + 2, … in turn. `options.m`: tokens of all ranks
/// together; `options.k`: columns of all heads; `slices.columns` cuts k, and its `parts` are strips of rows.
[[nodiscard]] OverlapPlan plan_all_to_all_gemm(const PlanOptions& options, const HeadSlices& slices);
/// The same by one all-to-all at the start: the baseline. The main loop takes the columns in the same order.
[[nodiscard]] OverlapPlan plan_serial_all_to_all_gemm(const PlanOptions& options, const HeadSlices& slices);
/// The slicing baseline: each rank's columns in `num_slices` nearly equal pieces (piece i of c columns is
/// [i * c / num_slices, (i + 1) * c / num_slices), rounded down), an all-to-all for each. A rank's input
/// holds its pieces one after the other, each dense, [options.m, columns of the piece]. The main loop takes
/// piece after piece, so with more than one the sums are taken in another order.
[[nodiscard]] OverlapPlan plan_sliced_all_to_all_gemm(const PlanOptions& options, const HeadSlices& slices,
                                                      std::int64_t num_slices);

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

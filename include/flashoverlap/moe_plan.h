#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/moe_routing.h"
#include "flashoverlap/plan.h"

/// Plans of a mixture-of-experts layer (arXiv 2607.19539), pure host code.
///
/// Words, used as defined here:
///   send rows   the (token, slot) pairs of one rank that go to an expert, ordered by expert, then token,
///   then
///               slot. The experts of a rank are consecutive, so the rows for one rank are consecutive too
///   owner       the rank whose token a row is: it sends the row in, and gets the result back
///   group       the rows of one owner for one expert, consecutive in the expert rows
///   expert rows all rows that a rank's experts compute: its groups one after the other
///   row band    one tile high piece of the expert rows, as wide as the result: what travels (paper, 3.3)
///   segment     consecutive row bands of the schedule that travel together (paper, figure 3b)
namespace flashoverlap {

/// What becomes of rows between groups (paper, section 4.5; our own are beyond the paper).
enum class MoePadding {
  kPaper,   ///< Every group is padded with zero rows to a multiple of the tile height, as Algorithm 1 does.
            ///< With one rank, where nothing travels, as kRagged.
  kRagged,  ///< Tiles end at the end of their group; the last band of a group has fewer rows. Nothing is
            ///< padded.
  kShared,  ///< Tiles run on over the groups of one expert, and only an expert's last band is ragged: the
            ///< number of tiles does not grow with the number of ranks. A band may then hold rows of several
            ///< owners.
};

/// How groups follow each other in the expert rows, and so how tiles do in the schedule.
enum class MoeOrder {
  /// Expert by expert, in each the remote owners and then this rank (Algorithm 1). Owners in the order rank +
  /// 1,
  /// rank + 2, …, since in that order results leave.
  kExpertMajor,
  kOwnerMajor,  ///< Owner by owner, this rank last: one dispatch transfer for each pair of ranks.
};

/// How rows travel.
enum class MoeTransport {
  kPut,         ///< Written into the other rank's memory, which learns of it by a flag.
  kCollective,  ///< All-to-alls: dispatch as one, the results in wave groups (arXiv 2504.19519, "subtokens").
};

[[nodiscard]] std::string_view name_of(MoePadding padding);      ///< "paper", "ragged", "shared"
[[nodiscard]] std::string_view name_of(MoeOrder order);          ///< "expert-major", "owner-major"
[[nodiscard]] std::string_view name_of(MoeTransport transport);  ///< "put", "collective"
/// The inverses. Throw Error(kBadArgument) that lists the names.
[[nodiscard]] MoePadding parse_moe_padding(std::string_view name);
[[nodiscard]] MoeOrder parse_moe_order(std::string_view name);
[[nodiscard]] MoeTransport parse_moe_transport(std::string_view name);

/// What all ranks of a layer pass alike, `rank` apart.
struct MoePlanOptions {
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  DType dtype = DType::kFloat32;
  std::int64_t num_experts = 1;  ///< Of all ranks; rank r has [r * E / W, (r + 1) * E / W).
  std::int64_t tile_m = 128;
  std::int64_t tile_n = 128;
  MoePadding padding = MoePadding::kRagged;
  MoeOrder order = MoeOrder::kOwnerMajor;  ///< kShared needs kExpertMajor, kCollective kOwnerMajor.
  MoeTransport transport = MoeTransport::kPut;
  /// Bands of an inner segment, >= 1: the paper's x. The first and the last segment have one band.
  std::int64_t segment_bands = 2;
  /// kCollective: number of all-to-alls of the results, >= 1. 1 is "no overlap": the first GEMM then waits
  /// for the dispatch with all of its tiles.
  std::int64_t collective_groups = 4;
  /// compute_units: units for tiles; communication_units: consumers, each a channel of its own, at least 1 in
  /// effect.
  Resources resources;
};

/// The same without overlap, the baseline: the rows that no padding changes, one all-to-all before the first
/// GEMM and one after the second.
[[nodiscard]] MoePlanOptions serial_moe_options(const MoePlanOptions& options);

/// How many rows each rank sends to each expert: all that a plan needs to know of the routing.
struct MoeCounts {
  std::int32_t world_size = 1;
  std::int64_t num_experts = 1;
  std::vector<std::int64_t> rows;  ///< [world_size, num_experts]
  [[nodiscard]] std::int64_t at(std::int64_t rank, std::int64_t expert) const {
    return rows[static_cast<std::size_t>(rank * num_experts + expert)];
  }
};

/// Rows per expert of one rank's routing: that rank's row of MoeCounts.
[[nodiscard]] std::vector<std::int64_t> count_rows(const MoeRouting& routing);

/// What `counts` becomes when no expert takes more than `capacity` rows: the ranks' rows are taken in rank
/// order, and in a rank in the order of its send rows. 0: no limit. Throws Error(kBadArgument) below 0.
[[nodiscard]] MoeCounts with_capacity(const MoeCounts& counts, std::int64_t capacity);

/// First expert of `rank`; of rank world_size: num_experts.
[[nodiscard]] std::int64_t first_expert(std::int64_t num_experts, std::int32_t world_size, std::int32_t rank);

struct MoeGroup {
  std::int64_t expert = 0;  ///< Of all ranks.
  std::int32_t owner = 0;
  std::int64_t row_begin = 0;    ///< In the expert rows.
  std::int64_t rows = 0;         ///< May be 0.
  std::int64_t padded_rows = 0;  ///< >= rows; those beyond are zero, and are computed but never sent.
  std::int64_t owner_row = 0;    ///< Of its first row in the owner's send rows.
};

/// The expert rows of one rank.
struct MoeLayout {
  std::vector<MoeGroup> groups;  ///< In row order.
  std::int64_t rows = 0;         ///< Padding included.
  std::int64_t valid_rows = 0;
  std::int64_t send_rows =
      0;                      ///< Of this rank: its (token, slot) pairs that go to an expert, wherever it is.
  std::int64_t own_rows = 0;  ///< Of these, for its own experts.
};

/// Algorithm 1, first part: the row layout. Throws Error(kBadArgument) naming the option or count.
[[nodiscard]] MoeLayout moe_layout(const MoePlanOptions& options, const MoeCounts& counts);

/// One part of a row band that goes to one owner: an entry of the combine plan (paper, 3.2.3).
struct MoeBandPart {
  std::int32_t destination = 0;
  std::int64_t destination_row = 0;  ///< In the owner's send rows, which is where the result belongs.
  std::int64_t row_begin = 0;        ///< In the expert rows.
  std::int64_t rows = 0;             ///< Valid ones.
};

struct MoeBand {
  std::int64_t expert = 0;
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;           ///< Padding included.
  std::vector<MoeBandPart> parts;  ///< In row order. One, but for kShared.
  [[nodiscard]] bool remote(std::int32_t rank) const {
    for (const MoeBandPart& part : parts) {
      if (part.destination != rank) return true;
    }
    return false;
  }
};

/// Algorithm 1, second part: the bands in the order in which the second GEMM computes them. Rule (i): bands
/// with remote rows before all others. Rule (ii), kExpertMajor: experts with more remote bands first, all
/// owners of one after the other. kOwnerMajor: owners in the order rank + 1, rank + 2, …, so that receivers
/// are not all sent to by everybody at once, and in each the experts in their order, so that what an owner
/// gets is one run.
[[nodiscard]] std::vector<MoeBand> moe_bands(const MoePlanOptions& options, const MoeCounts& counts);

/// Bands [first_band, first_band + num_bands) of the schedule.
struct MoeSegment {
  std::int64_t first_band = 0;
  std::int64_t num_bands = 0;
};

/// One band first, `inner_bands` at a time, one band last (paper, figure 3b). Bands that stay on the rank
/// form segments of their own behind the last remote one.
[[nodiscard]] std::vector<MoeSegment> moe_segments(std::int64_t remote_bands, std::int64_t local_bands,
                                                   std::int64_t inner_bands);

/// Rows that a machine whose tiles all cost as much as a whole one computes beyond the valid ones.
struct MoeWaste {
  std::int64_t valid_rows = 0;
  std::int64_t computed_rows = 0;  ///< Row bands * tile height.
  std::int64_t bands = 0;
  std::int64_t experts = 0;  ///< Of this rank, with rows.
  [[nodiscard]] std::int64_t wasted_rows() const { return computed_rows - valid_rows; }
};
[[nodiscard]] MoeWaste moe_waste(const MoePlanOptions& options, const MoeCounts& counts);

/// Consumers that keep up with the producer: the smallest c in [1, units - 1] for which sending `bytes` at
/// min(c * unit_gbps, link_gbps) takes no longer than computing, which takes compute_us on all units and
/// compute_us * units / (units - c) on those left; units - 1 where none does because consumers are too slow,
/// but never more than saturate the link. 1 where there is nothing to send. Throws Error(kBadArgument) for
/// units < 2 or numbers that are not finite and > 0 (bytes, compute_us: >= 0).
[[nodiscard]] std::int64_t moe_consumer_budget(std::int64_t units, double bytes, double compute_us,
                                               double unit_gbps, double link_gbps);

/// The first expert GEMM with the dispatch hidden behind it: out[expert rows, n] = rows · B_expert^T.
///   A        [layout.rows + layout.send_rows - layout.own_rows, k]: the expert rows, then this rank's send
///   rows
///            for other ranks. The caller has put the latter there, and in the expert rows this rank's own
///            rows and zeros in padding
///   B        [experts of this rank, n, k]
///   schedule this rank's own rows first, then owners in order of arrival: rank - 1, rank - 2, …
///   gates    each tile by the slices of the owners whose rows it has
/// Throws Error(kBadArgument) for options and counts that do not hold. Passes `verify`.
[[nodiscard]] OverlapPlan plan_moe_dispatch(const MoePlanOptions& options, const MoeCounts& counts,
                                            std::int64_t n, std::int64_t k);

/// The second expert GEMM with the return hidden behind it: A [layout.rows, k], B [experts of this rank, n,
/// k], output [send rows, n]: row i is the result for send row i of this rank, whichever rank computed it.
/// Groups are segments (kPut) or equal shares (kCollective). Own rows that lie as in the output stay there.
[[nodiscard]] OverlapPlan plan_moe_combine(const MoePlanOptions& options, const MoeCounts& counts,
                                           std::int64_t n, std::int64_t k);

/// The plans of all ranks; quicker than one by one. `options.rank` is not looked at.
[[nodiscard]] std::vector<OverlapPlan> plan_moe_dispatch_all(const MoePlanOptions& options,
                                                             const MoeCounts& counts, std::int64_t n,
                                                             std::int64_t k);
[[nodiscard]] std::vector<OverlapPlan> plan_moe_combine_all(const MoePlanOptions& options,
                                                            const MoeCounts& counts, std::int64_t n,
                                                            std::int64_t k);

/// Layout, bands, combine plan, segments and waste of one rank, as `flashoverlap plan moe-layer` prints them.
[[nodiscard]] std::string moe_plan_text(const MoePlanOptions& options, const MoeCounts& counts);

}  // namespace flashoverlap

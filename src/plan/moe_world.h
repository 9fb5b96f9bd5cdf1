#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "flashoverlap/moe_plan.h"

/// What the plans of a MoE layer have in common on all ranks, worked out once.
namespace flashoverlap::plan {

/// Throws Error(kBadArgument) naming the option or count that does not hold.
void check_moe(const MoePlanOptions& options, const MoeCounts& counts);

/// Groups of `rank` in row order, `owner_row` left at 0: all that tells where rows lie.
std::vector<MoeGroup> place_groups(const MoePlanOptions& options, const MoeCounts& counts, std::int32_t rank);

/// Rows of one owner that travel to a rank together, and where they go.
struct MoeArrival {
  std::int32_t owner = 0;
  std::int64_t row_begin = 0;  ///< In the expert rows of the rank that receives them.
  std::int64_t rows = 0;
  std::int64_t owner_row = 0;  ///< Of the first in the owner's send rows.
};

/// A band with its place in the grid of the second GEMM.
struct PlacedBand {
  MoeBand band;
  std::int64_t problem = 0;
  std::int64_t row_in_problem = 0;  ///< In bands.
  bool remote = false;
};

/// Parts of one segment that are one run at their destination, as long as can be, and so one put. In row
/// order there.
struct MoeRun {
  std::int32_t destination = 0;
  std::int64_t destination_row = 0;
  std::int64_t rows = 0;
  struct Member {
    std::size_t band = 0;  ///< In the schedule.
    std::size_t part = 0;
  };
  std::vector<Member> parts;
};

/// A run as its destination sees it. Slices of a rank are numbered by source, then in the source's order.
struct MoeIncoming {
  std::int32_t source = 0;
  const MoeRun* run = nullptr;
};

/// Results for a rank's own tokens by its own experts. Where they lie in the grid of the second GEMM in the
/// order of its output, tiles write them there, and they never travel.
struct MoeOwnRows {
  std::int64_t output_row = 0;  ///< Of the first.
  std::int64_t shift = 0;       ///< From a row of the grid to its row of the output.
  std::int64_t rows = 0;        ///< 0: none, or they travel as the others do.
};

class MoeWorld {
 public:
  MoeWorld(const MoePlanOptions& options, const MoeCounts& counts);

  [[nodiscard]] MoePlanOptions options_of(std::int32_t rank) const;
  [[nodiscard]] const MoeCounts& counts() const { return counts_; }
  [[nodiscard]] std::int64_t first_expert(std::int32_t rank) const;

  // Made when first asked for, and kept.
  [[nodiscard]] const MoeLayout& layout(std::int32_t rank);
  /// From other ranks, by owner; of one owner in row order.
  [[nodiscard]] const std::vector<MoeArrival>& arrivals(std::int32_t rank);
  /// In the order of the second GEMM's schedule.
  [[nodiscard]] const std::vector<PlacedBand>& bands(std::int32_t rank);

  [[nodiscard]] const MoeOwnRows& own_rows(std::int32_t rank);
  /// Rows of the received buffer before that of an output row: it has none for own rows that stay.
  [[nodiscard]] std::int64_t received_row(std::int32_t rank, std::int64_t output_row);

  /// Own bands that stay are the last segment.
  [[nodiscard]] const std::vector<MoeSegment>& segments(std::int32_t rank);
  /// [segment][run]
  [[nodiscard]] const std::vector<std::vector<MoeRun>>& runs(std::int32_t rank);
  [[nodiscard]] const std::vector<MoeIncoming>& incoming(std::int32_t rank);
  /// The slice at `destination` of the first run from `source`.
  [[nodiscard]] std::int64_t first_slice(std::int32_t source, std::int32_t destination);

  [[nodiscard]] std::uint64_t agreement(std::string_view operation, std::int64_t n, std::int64_t k) const;

 private:
  MoePlanOptions options_;
  MoeCounts counts_;
  std::map<std::int32_t, MoeLayout> layouts_;
  std::map<std::int32_t, std::vector<MoeArrival>> arrivals_;
  std::map<std::int32_t, std::vector<PlacedBand>> bands_;
  std::map<std::int32_t, MoeOwnRows> own_rows_;
  std::map<std::int32_t, std::vector<MoeSegment>> segments_;
  std::map<std::int32_t, std::vector<std::vector<MoeRun>>> runs_;
  std::vector<std::vector<MoeIncoming>> incoming_;  // by destination; empty until asked for
};

/// Problems of one rank's grid: one per group, or per expert (kShared). `with_padding`: padding rows are
/// computed as well.
std::vector<Problem> moe_problems(const MoePlanOptions& options, const MoeLayout& layout, std::int64_t n,
                                  bool with_padding);

OverlapPlan moe_dispatch_plan(MoeWorld& world, std::int32_t rank, std::int64_t n, std::int64_t k);
OverlapPlan moe_combine_plan(MoeWorld& world, std::int32_t rank, std::int64_t n, std::int64_t k);

/// Parts of moe_combine_plan, by transport.
void combine_by_puts(MoeWorld& world, OverlapPlan& plan);
void combine_by_all_to_alls(MoeWorld& world, OverlapPlan& plan);

/// Which consumer puts what. Each serves some of the other ranks, so that as many ranks as possible are put
/// to at a time: with consumers that take puts in turn, several of them would share the port of one rank
/// while other ports idle. Where consumers outnumber ranks, no rank shares one, and some have several that
/// take turns.
class PutChannels {
 public:
  explicit PutChannels(const OverlapPlan& plan);
  /// The channel of the next put to `peer`.
  [[nodiscard]] std::int32_t next(std::int32_t peer);

 private:
  std::int32_t rank_;
  std::int32_t world_size_;
  std::int32_t consumers_;
  std::vector<std::int32_t> puts_;  ///< So far, by peer.
};

/// First tile of each problem in the grid, and the number of tile columns.
struct TileIndex {
  std::vector<std::int64_t> first;
  std::int64_t cols = 0;
  TileIndex(const std::vector<Problem>& problems, std::int64_t n, std::int64_t tile_m, std::int64_t tile_n);
  [[nodiscard]] std::int64_t tile(const PlacedBand& band, std::int64_t col) const {
    return first[static_cast<std::size_t>(band.problem)] + band.row_in_problem * cols + col;
  }
};

}  // namespace flashoverlap::plan

#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "flashoverlap/plan_builders.h"

/// What the plan builders share.
namespace flashoverlap::plan {

/// Throws Error(kBadArgument) naming the option that does not hold. Everything but the partition, which needs
/// the waves.
void check_options(const PlanOptions& options);

/// Throws Error(kBadArgument) naming the option when `value` is below `minimum`.
void at_least(std::string_view name, std::int64_t value, std::int64_t minimum);

/// Throws Error(kBadArgument) unless world_size >= 1 and `rank` is in [0, world_size).
void check_rank(std::int32_t rank, std::int32_t world_size);

/// Throws Error(kBadArgument) unless `a` x `b` elements of `dtype` can be addressed; the names are those of
/// the sizes.
void check_matrix(std::string_view a_name, std::int64_t a, std::string_view b_name, std::int64_t b,
                  DType dtype);

/// options.partition checked against `waves`, or the default one when it is empty.
std::vector<std::int64_t> resolve_partition(const PlanOptions& options, std::int64_t waves);

/// `partition` in the same proportions for a rank with `waves` waves, which are no more than it sums to.
/// Equally many groups, some of which may get 0 waves.
std::vector<std::int64_t> scale_partition(std::span<const std::int64_t> partition, std::int64_t waves);

/// The groups of a schedule of `num_tiles` tiles with the given waves each.
std::vector<WaveGroup> make_groups(std::span<const std::int64_t> partition, std::int64_t num_tiles,
                                   std::int64_t compute_units);

/// Tiles of a rows x cols matrix.
std::int64_t count_tiles(std::int64_t rows, std::int64_t cols, std::int64_t tile_m, std::int64_t tile_n);

/// A plan with what every builder sets alike: names, sizes, an in-place placement; no schedule, groups or
/// transfers yet.
OverlapPlan start_plan(std::string_view operation, const PlanOptions& options, TileGrid grid);

/// The schedule's tiles of one group.
std::span<const std::int64_t> tiles_of(const OverlapPlan& plan, const WaveGroup& group);

/// Writes the segments of all tiles, given per tile in `segments_of_tile` order, into `placement`.
class PlacementBuilder {
 public:
  explicit PlacementBuilder(std::int64_t num_tiles);
  /// The next tile's segments; call once per tile in tile order.
  void add_tile(std::span<const PlacementSegment> segments);
  Placement take();

 private:
  Placement placement_;
};

}  // namespace flashoverlap::plan

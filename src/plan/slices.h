#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "flashoverlap/plan_builders.h"

/// What the builders of tail-free plans (arXiv 2604.24013) share: slices, their parts, who comes when.
namespace flashoverlap::plan {

/// A run of tile rows (or columns) of one rank's slice that travels in one transfer. Never empty.
struct Part {
  std::int64_t begin = 0;  ///< Along the axis, in rows or columns of the product.
  std::int64_t size = 0;
  std::vector<std::int64_t> tiles;  ///< In the order in which they are computed.
};

/// The product cut along one axis into one slice per rank: the grid has one problem for each.
class Slices {
 public:
  /// `begins`: of slice_begins.
  Slices(const PlanOptions& options, std::vector<std::int64_t> begins, SliceAxis axis);

  [[nodiscard]] TileGrid grid() const;
  [[nodiscard]] std::int64_t begin(std::int64_t rank) const {
    return begins_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] std::int64_t size(std::int64_t rank) const { return begin(rank + 1) - begin(rank); }
  /// A rank's slice in `count` parts, fewer where it has fewer tiles along the axis; nearly equal, in order.
  [[nodiscard]] std::vector<Part> parts(std::int64_t rank, std::int64_t count) const;
  [[nodiscard]] std::int64_t num_parts(std::int64_t rank, std::int64_t count) const;
  /// The tiles of a rank's slice, in the order in which they are computed, in `count` runs of nearly equally
  /// many; fewer where it has fewer tiles, none where it has none.
  [[nodiscard]] std::vector<std::vector<std::int64_t>> tile_parts(std::int64_t rank,
                                                                  std::int64_t count) const;
  [[nodiscard]] std::int64_t num_tile_parts(std::int64_t rank, std::int64_t count) const;

 private:
  [[nodiscard]] std::int64_t tile_rows(std::int64_t rank) const;
  [[nodiscard]] std::int64_t tile_cols(std::int64_t rank) const;
  /// Tile rows, or tile columns, of a rank's slice along the axis.
  [[nodiscard]] std::int64_t num_strips(std::int64_t rank) const;

  const PlanOptions& options_;
  std::vector<std::int64_t> begins_;
  SliceAxis axis_;
  std::vector<std::int64_t> first_tile_;  ///< Of each rank's problem.
};

/// The rank `steps` after `rank`: in step d rank r sends to rank_after(r, d) and receives from
/// rank_after(r, -d), so that no two ranks use the same link at once.
std::int32_t rank_after(std::int32_t rank, std::int32_t steps, std::int32_t world_size);

/// In which channel each message travels. Channels are of the sender, so that nothing that it sends waits for
/// what it receives; step after step takes the next, and all of one slice is in one.
class SendChannels {
 public:
  /// `asked`: SliceOptions::send_channels; `otherwise` where that is 0. Throws Error(kBadArgument) for a
  /// negative number.
  SendChannels(std::int64_t asked, std::int64_t otherwise, std::int32_t world_size);

  /// Of what `sender` sends in `step` (1, 2, …).
  [[nodiscard]] std::int32_t of(std::int32_t sender, std::int32_t step) const {
    return sender + (step - 1) % count_ * world_size_;
  }
  [[nodiscard]] std::int64_t count() const { return count_; }

 private:
  std::int32_t world_size_;
  std::int32_t count_;
};

/// Of `SendChannels`: where slices are sent as they are computed, and where all are there at the start.
constexpr std::int64_t kChannelsOfComputed = 2;
constexpr std::int64_t kChannelsOfGiven = 1;

Transfer send_to(std::int32_t peer, std::int32_t channel, Trigger trigger, const Region& source);
Transfer receive_from(std::int32_t peer, std::int32_t channel, const Region& destination, std::int64_t slice);

/// Throws Error(kBadArgument) when options.partition is not empty: slices take its place.
void check_no_partition(const PlanOptions& options);
/// Throws Error(kBadArgument) for parts < 0.
void check_parts(std::int64_t parts);
/// Throws Error(kBadArgument) unless a slicing baseline can have so many slices: 1 to 65536.
void check_num_slices(std::int64_t num_slices);

/// The hash of a call with these slices; see hash_options.
std::uint64_t hash_slices(std::string_view operation, const PlanOptions& options,
                          const std::vector<std::int64_t>& begins, SliceAxis axis, std::int64_t parts,
                          std::int64_t channels);

}  // namespace flashoverlap::plan

#include "plan/slices.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/fail.h"
#include "plan/agreement.h"
#include "plan/arithmetic.h"

namespace flashoverlap {

std::string_view name_of(SliceAxis axis) {
  return axis == SliceAxis::kRows ? "rows" : "columns";
}

std::vector<std::int64_t> slice_begins(const SliceOptions& slices, std::int64_t size,
                                       std::int32_t world_size) {
  std::vector<std::int64_t> begins{0};
  if (slices.sizes.empty()) {
    for (std::int64_t rank = 1; rank <= world_size; ++rank)
      begins.push_back(plan::share_begin(size, world_size, rank));
    return begins;
  }
  if (std::ssize(slices.sizes) != world_size) {
    core::fail(ErrorKind::kBadArgument, "there are {} slice sizes ({}); expected one for each of {} ranks",
               slices.sizes.size(), fmt::join(slices.sizes, ","), world_size);
  }
  for (std::size_t rank = 0; rank < slices.sizes.size(); ++rank) {
    const std::int64_t slice = slices.sizes[rank];
    if (slice < 0) {
      core::fail(ErrorKind::kBadArgument, "slice {} has size {}; it must be at least 0", rank, slice);
    }
    begins.push_back(plan::sum(begins.back(), slice).value_or(std::numeric_limits<std::int64_t>::max()));
  }
  if (begins.back() != size) {
    core::fail(ErrorKind::kBadArgument, "slice sizes {} sum to {}; expected {}", fmt::join(slices.sizes, ","),
               begins.back(), size);
  }
  return begins;
}

namespace plan {

Slices::Slices(const PlanOptions& options, std::vector<std::int64_t> begins, SliceAxis axis)
    : options_(options), begins_(std::move(begins)), axis_(axis) {
  std::int64_t first = 0;
  for (std::int64_t rank = 0; rank < options.world_size; ++rank) {
    first_tile_.push_back(first);
    first += tile_rows(rank) * tile_cols(rank);
  }
}

TileGrid Slices::grid() const {
  std::vector<Problem> problems;
  for (std::int64_t rank = 0; rank < options_.world_size; ++rank) {
    if (axis_ == SliceAxis::kRows) {
      problems.push_back({.row_begin = begin(rank), .rows = size(rank), .cols = options_.n});
    } else {
      problems.push_back({.rows = options_.m, .col_begin = begin(rank), .cols = size(rank)});
    }
  }
  return TileGrid(std::move(problems), options_.k, options_.tile_m, options_.tile_n);
}

std::int64_t Slices::tile_rows(std::int64_t rank) const {
  const bool empty = (axis_ == SliceAxis::kRows ? options_.n : size(rank)) == 0;
  if (empty) return 0;
  return ceil_div(axis_ == SliceAxis::kRows ? size(rank) : options_.m, options_.tile_m);
}

std::int64_t Slices::tile_cols(std::int64_t rank) const {
  return ceil_div(axis_ == SliceAxis::kRows ? options_.n : size(rank), options_.tile_n);
}

std::int64_t Slices::num_strips(std::int64_t rank) const {
  return ceil_div(size(rank), axis_ == SliceAxis::kRows ? options_.tile_m : options_.tile_n);
}

std::int64_t Slices::num_parts(std::int64_t rank, std::int64_t count) const {
  return std::min(std::max<std::int64_t>(count, 1), num_strips(rank));
}

std::vector<Part> Slices::parts(std::int64_t rank, std::int64_t count) const {
  const bool by_rows = axis_ == SliceAxis::kRows;
  const std::int64_t tile = by_rows ? options_.tile_m : options_.tile_n;
  const std::int64_t strips = num_strips(rank);
  const std::int64_t cols = tile_cols(rank);
  const std::int64_t num = num_parts(rank, count);
  std::vector<Part> parts;
  for (std::int64_t p = 0; p < num; ++p) {
    const std::int64_t first = share_begin(strips, num, p);
    const std::int64_t end = share_begin(strips, num, p + 1);
    Part part{.begin = begin(rank) + first * tile, .size = 0, .tiles = {}};
    part.size = std::min(end * tile, size(rank)) - first * tile;
    const std::int64_t part_rows = by_rows ? (cols == 0 ? 0 : end - first) : tile_rows(rank);
    const std::int64_t part_cols = by_rows ? cols : end - first;
    const std::int64_t first_row = by_rows ? first : 0;
    const std::int64_t first_col = by_rows ? 0 : first;
    for (const std::int64_t t : swizzled_order(part_rows, part_cols, options_.swizzle)) {
      const std::int64_t row = first_row + t / part_cols;
      const std::int64_t col = first_col + t % part_cols;
      part.tiles.push_back(first_tile_[index(rank)] + row * cols + col);
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

std::int64_t Slices::num_tile_parts(std::int64_t rank, std::int64_t count) const {
  return std::min(std::max<std::int64_t>(count, 1), tile_rows(rank) * tile_cols(rank));
}

std::vector<std::vector<std::int64_t>> Slices::tile_parts(std::int64_t rank, std::int64_t count) const {
  std::vector<std::vector<std::int64_t>> runs;
  for (const Part& whole : parts(rank, 1)) {
    const auto num_tiles = std::ssize(whole.tiles);
    const std::int64_t num_runs = num_tile_parts(rank, count);
    for (std::int64_t run = 0; run < num_runs; ++run) {
      runs.emplace_back(whole.tiles.begin() + share_begin(num_tiles, num_runs, run),
                        whole.tiles.begin() + share_begin(num_tiles, num_runs, run + 1));
    }
  }
  return runs;
}

std::int32_t rank_after(std::int32_t rank, std::int32_t steps, std::int32_t world_size) {
  return static_cast<std::int32_t>((rank + steps % world_size + world_size) % world_size);
}

SendChannels::SendChannels(std::int64_t asked, std::int64_t otherwise, std::int32_t world_size)
    : world_size_(world_size) {
  if (asked < 0) {
    core::fail(ErrorKind::kBadArgument, "send_channels is {}; expected at least 1, or 0: chosen", asked);
  }
  // There are no more slices to send than other ranks.
  const std::int64_t most = std::max(1, world_size - 1);
  count_ = static_cast<std::int32_t>(std::min(asked == 0 ? otherwise : asked, most));
}

Transfer send_to(std::int32_t peer, std::int32_t channel, Trigger trigger, const Region& source) {
  Transfer transfer;
  transfer.kind = TransferKind::kSend;
  transfer.trigger = trigger;
  transfer.channel = channel;
  transfer.peer = peer;
  transfer.source = source;
  return transfer;
}

Transfer receive_from(std::int32_t peer, std::int32_t channel, const Region& destination,
                      std::int64_t slice) {
  Transfer transfer;
  transfer.kind = TransferKind::kReceive;
  transfer.channel = channel;
  transfer.peer = peer;
  transfer.destination = destination;
  transfer.slice = slice;
  return transfer;
}

void check_no_partition(const PlanOptions& options) {
  if (options.partition.empty()) return;
  core::fail(ErrorKind::kBadArgument,
             "partition {} does not apply to tail-free plans: slices take its place; expected none",
             fmt::join(options.partition, ","));
}

void check_parts(std::int64_t parts) {
  if (parts < 0) {
    core::fail(ErrorKind::kBadArgument, "parts of a slice are {}; expected at least 1, or 0: chosen", parts);
  }
}

void check_num_slices(std::int64_t num_slices) {
  constexpr std::int64_t kMost = 65536;  // Each is a transfer, even where it is empty.
  if (num_slices < 1) {
    core::fail(ErrorKind::kBadArgument, "num_slices is {}; it must be at least 1", num_slices);
  }
  if (num_slices > kMost) {
    core::fail(ErrorKind::kBadArgument, "num_slices is {}; it must be at most {}", num_slices, kMost);
  }
}

std::uint64_t hash_slices(std::string_view operation, const PlanOptions& options,
                          const std::vector<std::int64_t>& begins, SliceAxis axis, std::int64_t parts,
                          std::int64_t channels) {
  AgreementHash hash = hash_options(operation, options, {});
  hash.add(std::span(begins));
  hash.add(name_of(axis));
  hash.add(parts);
  hash.add(channels);
  return hash.value();
}

}  // namespace plan
}  // namespace flashoverlap

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "core/fail.h"
#include "flashoverlap/plan_builders.h"
#include "plan/arithmetic.h"
#include "plan/builder.h"

namespace flashoverlap {
namespace {

constexpr std::int64_t kDefaultGroups = 8;

__extension__ using Wide = __int128;

/// The fewest waves, 1 to `waves`, that have `wanted` of the `bytes` of all; all of them where that is too
/// much.
std::int64_t waves_with_bytes(std::int64_t waves, std::int64_t bytes, std::int64_t wanted) {
  if (wanted == 0) return 1;
  if (bytes <= wanted) return waves;
  return static_cast<std::int64_t>((Wide{wanted} * waves + bytes - 1) / bytes);
}

}  // namespace

std::vector<std::int64_t> default_partition(std::int64_t waves) {
  return default_partition(waves, 0, 0);
}

std::vector<std::int64_t> default_partition(std::int64_t waves, std::int64_t bytes,
                                            std::int64_t min_group_bytes) {
  plan::at_least("waves", waves, 0);
  plan::at_least("bytes", bytes, 0);
  plan::at_least("min_group_bytes", min_group_bytes, 0);
  if (waves == 0) return {};
  const std::int64_t smallest = waves_with_bytes(waves, bytes, min_group_bytes);
  // What is still to be sent after the last tile is exposed, so the last group is as small as it can be.
  const std::int64_t rest = waves - smallest;
  const std::int64_t others = std::min(kDefaultGroups - 1, rest / smallest);
  if (others == 0) return {waves};
  std::vector<std::int64_t> partition;
  for (std::int64_t i = 0; i < others; ++i) {
    partition.push_back(plan::share_begin(rest, others, i + 1) - plan::share_begin(rest, others, i));
  }
  partition.push_back(smallest);
  return partition;
}

std::int64_t num_waves(const PlanOptions& options) {
  plan::check_options(options);
  return plan::ceil_div(plan::count_tiles(options.m, options.n, options.tile_m, options.tile_n),
                        options.resources.compute_units);
}

std::int64_t num_waves_reduce_scatter(const PlanOptions& options, RowOwnership rows) {
  return rows == RowOwnership::kBlockCyclic ? num_waves(options)
                                            : num_waves_reduce_scatter(options, SliceOptions{});
}

namespace plan {

std::int64_t count_tiles(std::int64_t rows, std::int64_t cols, std::int64_t tile_m, std::int64_t tile_n) {
  return ceil_div(rows, tile_m) * ceil_div(cols, tile_n);
}

std::vector<std::int64_t> resolve_partition(const PlanOptions& options, std::int64_t waves) {
  const std::vector<std::int64_t>& partition = options.partition;
  if (partition.empty()) return default_partition(waves);
  std::int64_t total = 0;
  for (std::size_t i = 0; i < partition.size(); ++i) {
    if (partition[i] < 1) {
      core::fail(ErrorKind::kBadArgument,
                 "partition {} gives group {} {} waves; every group needs at least 1",
                 fmt::join(partition, ","), i, partition[i]);
    }
    total = sum(total, partition[i]).value_or(std::numeric_limits<std::int64_t>::max());
  }
  if (total != waves) {
    core::fail(ErrorKind::kBadArgument, "partition {} sums to {} waves, but the plan has {}",
               fmt::join(partition, ","), total, waves);
  }
  return partition;
}

std::vector<std::int64_t> scale_partition(std::span<const std::int64_t> partition, std::int64_t waves) {
  std::int64_t total = 0;
  for (const std::int64_t part : partition) total += part;
  std::vector<std::int64_t> scaled;
  std::int64_t passed = 0;
  std::int64_t begin = 0;
  for (const std::int64_t part : partition) {
    passed += part;
    const Wide nearest = (Wide{2} * passed * waves + total) / (Wide{2} * total);
    const auto end = static_cast<std::int64_t>(nearest);
    scaled.push_back(end - begin);
    begin = end;
  }
  return scaled;
}

std::vector<WaveGroup> make_groups(std::span<const std::int64_t> partition, std::int64_t num_tiles,
                                   std::int64_t compute_units) {
  std::vector<WaveGroup> groups;
  std::int64_t waves = 0;
  std::int64_t begin = 0;
  for (const std::int64_t part : partition) {
    waves += part;
    const std::int64_t end = std::min(num_tiles, waves * compute_units);  // The last wave may be ragged.
    groups.push_back({.first_position = begin, .num_tiles = end - begin});
    begin = end;
  }
  return groups;
}

}  // namespace plan
}  // namespace flashoverlap

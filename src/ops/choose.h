#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/plan_builders.h"

/// The tile and the partition where neither the caller nor a tuner says one. All ranks come to the same
/// answer: it depends only on what they agree on.
namespace flashoverlap::ops {

/// Replaces tile_m, tile_n and swizzle where they are 0.
void choose_tile(PlanOptions& options);

/// The fewest bytes of a wave group's transfer where GPUs choose the partition themselves. On four H200s
/// groups of 2 to 8 MiB, eight of which outputs of 16 and 32 MiB came to, took 1.06 to 2.68 times as long as
/// the best that was tried (GEMM + all-reduce and + reduce-scatter, k 1024 to 3584, docs/gpu-cluster.md),
/// because each pays a transfer's latency of 20 to 40 us, as long as some of the waves that it should hide
/// behind. With outputs of 64 MiB, whose groups had 8 MiB (the last one less), it was 0.99 to 1.24 times and
/// once 1.67, with larger ones 1.00 to 1.22.
inline constexpr std::int64_t kGpuGroupBytes = std::int64_t{8} << 20;

/// default_partition with groups of `min_group_bytes` or more of the product. `options`: complete but for the
/// partition.
[[nodiscard]] std::vector<std::int64_t> open_partition(const PlanOptions& options, std::int64_t waves,
                                                       std::int64_t min_group_bytes);

}  // namespace flashoverlap::ops

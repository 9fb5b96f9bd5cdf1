#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/predictor.h"

/// Finds the partition of the waves into groups that `predict` says is the fastest.
///
/// Both searches compare totals in whole picoseconds, so that sums are exact and ties are ties, and break
/// ties alike: the larger last group wins, then the larger group before it, and so on (fewer, larger
/// transfers; one group, which is no overlap, before all others). So both return the same partition.
namespace flashoverlap {

struct PartitionChoice {
  std::vector<std::int64_t> partition;  ///< Empty for 0 waves; one group: no overlap.
  Prediction prediction;
};

inline constexpr std::int64_t kMaxExhaustiveWaves = 20;
/// Above this many waves, neighbours are joined to blocks before the search, which is then exact only for
/// partitions into whole blocks.
inline constexpr std::int64_t kMaxSearchWaves = 8192;

/// All 2^(T-1) partitions (arXiv 2504.19519, section 4, without its pruning): the oracle. Throws
/// Error(kBadArgument) for a bad cost or more than kMaxExhaustiveWaves waves.
[[nodiscard]] PartitionChoice search_exhaustively(const OverlapCost& cost);

/// The same answer in O(T^2). For a prefix of the waves the computing time is fixed, and finishing its
/// communication earlier never makes the whole later; so the best finish of a prefix is all that its
/// continuation needs:
///   F(i) = min over j < i of max(F(j), ready(i - 1) + signal) + curve(bytes of waves j..i-1)
/// Throws Error(kBadArgument) for a bad cost.
[[nodiscard]] PartitionChoice search_partition(const OverlapCost& cost);

/// At most `count` different partitions, the best first. Up to 16 waves the best of all; beyond, the best of
/// each number of groups up to 16. For measuring more than the prediction's favourite.
[[nodiscard]] std::vector<PartitionChoice> best_partitions(const OverlapCost& cost, std::int64_t count);

}  // namespace flashoverlap

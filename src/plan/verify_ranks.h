#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "plan/verify.h"

/// The parts of `verify` for the plans of all ranks, each of which holds on its own.
namespace flashoverlap::plan {

/// A transfer of one rank.
struct TransferId {
  std::int32_t rank = -1;
  std::int64_t transfer = -1;
};

/// Which transfers belong together. Channels are numbered by rank in `channels`.
struct Matching {
  std::vector<std::int32_t> channels;  ///< Ascending: all that any rank uses.
  std::vector<std::vector<std::vector<std::int64_t>>>
      transfers;  ///< [rank][channel index]: in order of issue.
  std::vector<std::vector<std::int64_t>>
      ordinal;  ///< [rank][transfer]: how many collectives are before it in its channel.
  std::vector<std::vector<TransferId>> partner;  ///< [rank][transfer]: send <-> receive.
};

using Plans = std::span<const OverlapPlan>;

/// Elements [begin, end) of a received buffer come from rank `source`, from element `offset` of one of its
/// buffers on.
struct Arrival {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::size_t source = 0;
  std::int64_t offset = 0;
};

/// By rank: what sends, puts and all-to-alls bring into its received buffer from buffers of kind `from`, by
/// `begin`.
std::vector<std::vector<Arrival>> arrivals_from(Plans plans, const Matching& matching, BufferKind from);

/// Collectives and point-to-point transfers agree pairwise, in order, kind, and size.
Verdict match_transfers(Plans plans, Matching& matching);

/// What a reduction adds up is the same part of the product on all ranks.
Verdict check_summands(Plans plans, std::span<const Facts> facts, const Matching& matching);

/// Puts fit the peer's plan; every slice arrives exactly once.
Verdict check_arrivals(Plans plans, std::span<const Facts> facts);

/// Runs all ranks to their ends, with one compute unit each, and with sends that wait for their receives:
/// what ends so ends with more units and with buffered sends, too.
Verdict run_symbolically(Plans plans, const Matching& matching);

/// Restores and finish gates put what other ranks have sent where the product has it.
Verdict check_origins(Plans plans, std::span<const Facts> facts, const Matching& matching);

/// Input blocks hold the rows and columns that other ranks have of them.
Verdict check_input_origins(Plans plans, const Matching& matching);

bool is_collective(TransferKind kind);

}  // namespace flashoverlap::plan

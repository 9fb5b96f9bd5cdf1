#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "flashoverlap/plan.h"

/// The parts of `verify`. Each check relies on those listed before it, so that it may index without asking
/// again, and fills in its part of `Facts`. Nothing here throws or trusts a number that has not been checked.
namespace flashoverlap::plan {

/// One placement segment in the packed buffer.
struct PackedPiece {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t tile = 0;
  std::int64_t segment = 0;
};

/// What a transfer or a peer's put writes here. A reduction in place also spoils the rest of its source:
/// `touched`.
struct Incoming {
  BufferKind buffer = BufferKind::kReceived;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t touched_begin = 0;
  std::int64_t touched_end = 0;
  std::int64_t transfer = -1;  ///< -1: put by a peer.
  std::int64_t slice = -1;
};

struct Facts {
  std::array<std::int64_t, 5> buffer_size{};  ///< By BufferKind.
  std::vector<std::int64_t> group_of_tile;
  std::vector<PackedPiece> packed;  ///< By offset; covers the packed buffer without gap.
  std::vector<std::int64_t>
      packed_begin;  ///< Per group: its range of the packed buffer, empty where it has none.
  std::vector<std::int64_t> packed_end;
  std::vector<Incoming> incoming;  ///< By buffer and touched_begin.
};

Verdict check_header(const OverlapPlan& plan, Facts& facts);
Verdict check_input_blocks(const OverlapPlan& plan, const Facts& facts);
Verdict check_schedule(const OverlapPlan& plan);
Verdict check_groups(const OverlapPlan& plan, Facts& facts);
Verdict check_placement(const OverlapPlan& plan, Facts& facts);
Verdict check_slices(const OverlapPlan& plan, const Facts& facts);
Verdict check_transfers(const OverlapPlan& plan, const Facts& facts);
Verdict check_incoming(const OverlapPlan& plan, Facts& facts);
Verdict check_order(const OverlapPlan& plan, const Facts& facts);
Verdict check_gates(const OverlapPlan& plan, const Facts& facts);
Verdict check_input_waits(const OverlapPlan& plan, const Facts& facts);
Verdict check_output(const OverlapPlan& plan, const Facts& facts);
Verdict check_restore(const OverlapPlan& plan, const Facts& facts);

/// "elements [0, 64) of the packed buffer".
std::string describe(const Region& region);
/// "all-reduce after group 2".
std::string describe(const Transfer& transfer);
/// "transfer 3 (all-reduce after group 2)".
std::string describe(const OverlapPlan& plan, std::int64_t transfer);
/// "transfer 3 (...)" or "the put of slice 2 by rank 1".
std::string describe(const OverlapPlan& plan, const Incoming& incoming);

/// Verdict on whether a region lies inside its buffer; `what` begins the reason.
Verdict check_region(const Facts& facts, const Region& region, const std::string& what);

/// The product's row and column that an element of the packed buffer holds, and how far the segment goes on.
struct Origin {
  std::int64_t tile = 0;
  std::int64_t row = 0;
  std::int64_t col = 0;
  std::int64_t rows_left = 0;  ///< Rows of the segment from `row` on.
};
Origin origin_of(const OverlapPlan& plan, const Facts& facts, std::int64_t packed_offset);

/// All checks of one plan in turn.
Verdict verify_one(const OverlapPlan& plan, Facts& facts);

}  // namespace flashoverlap::plan

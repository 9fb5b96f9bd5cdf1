#include <algorithm>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/verify.h"

/// Schedule, groups and placement: what happens to each tile.
namespace flashoverlap::plan {
namespace {

using core::no;

/// The segments of one tile cover its rows once, in order; appended to `facts.packed`.
Verdict check_segments(const OverlapPlan& plan, std::int64_t t, Facts& facts) {
  const Tile& tile = plan.grid.tile(t);
  const std::int64_t first = plan.placement.first_segment[index(t)];
  const std::int64_t last = plan.placement.first_segment[index(t + 1)];
  std::int64_t row = 0;
  for (std::int64_t s = first; s < last; ++s) {
    const PlacementSegment& segment = plan.placement.segments[index(s)];
    if (segment.row_begin != row || segment.rows < 1 || segment.rows > tile.rows - row) {
      return no(
          "tile {}: segment {} places {} rows from row {} on, but the tile has {} rows and row {} comes next",
          t, s - first, segment.rows, segment.row_begin, tile.rows, row);
    }
    row += segment.rows;
    const std::int64_t count = segment.rows * tile.cols;
    if (segment.offset < 0 || count > plan.packed_size || segment.offset > plan.packed_size - count) {
      return no("tile {}: segment {} has offset {} and {} elements, outside the packed buffer of {} elements",
                t, s - first, segment.offset, count, plan.packed_size);
    }
    facts.packed.push_back({segment.offset, segment.offset + count, t, s});
  }
  if (first < last && row != tile.rows) {
    return no("tile {}: rows [{}, {}) are placed nowhere", t, row, tile.rows);
  }
  return {};
}

Verdict check_first_segment(const OverlapPlan& plan) {
  const auto& first = plan.placement.first_segment;
  const std::int64_t num_segments = std::ssize(plan.placement.segments);
  if (std::ssize(first) != plan.grid.num_tiles() + 1) {
    return no("placement.first_segment has {} entries for {} tiles; expected one more than tiles",
              first.size(), plan.grid.num_tiles());
  }
  if (first.front() != 0 || first.back() != num_segments) {
    return no("placement.first_segment runs from {} to {}, but there are {} segments", first.front(),
              first.back(), num_segments);
  }
  for (std::size_t t = 0; t + 1 < first.size(); ++t) {
    if (first[t] > first[t + 1])
      return no("placement.first_segment falls from {} to {} at tile {}", first[t], first[t + 1], t);
  }
  return {};
}

/// The segments, sorted, cover the packed buffer without gap or overlap.
Verdict check_bijection(const OverlapPlan& plan, Facts& facts) {
  if (!std::ranges::is_sorted(facts.packed, {}, &PackedPiece::begin)) {
    std::ranges::sort(facts.packed, {}, &PackedPiece::begin);
  }
  std::int64_t end = 0;
  for (std::size_t i = 0; i < facts.packed.size(); ++i) {
    const PackedPiece& piece = facts.packed[i];
    if (piece.begin < end) {
      return no("tiles {} and {} are both placed at element {} of the packed buffer",
                facts.packed[i - 1].tile, piece.tile, piece.begin);
    }
    if (piece.begin > end)
      return no("no tile is placed at elements [{}, {}) of the packed buffer", end, piece.begin);
    end = piece.end;
  }
  if (end != plan.packed_size) {
    return no("no tile is placed at elements [{}, {}) of the packed buffer", end, plan.packed_size);
  }
  return {};
}

Verdict check_groups_contiguous(const OverlapPlan& plan, Facts& facts) {
  facts.packed_begin.assign(plan.groups.size(), 0);
  facts.packed_end.assign(plan.groups.size(), 0);
  // In order of offset each group's segments must form one run.
  std::int64_t previous = -1;
  for (const PackedPiece& piece : facts.packed) {
    const std::int64_t group = facts.group_of_tile[index(piece.tile)];
    std::int64_t& begin = facts.packed_begin[index(group)];
    std::int64_t& end = facts.packed_end[index(group)];
    if (group == previous) {
      end = piece.end;
    } else if (begin == end) {
      begin = piece.begin;
      end = piece.end;
    } else {
      return no(
          "group {} is not contiguous in the packed buffer: tile {} at element {} lies behind group {}, "
          "while the group "
          "began at element {}",
          group, piece.tile, piece.begin, previous, begin);
    }
    previous = group;
  }
  return {};
}

}  // namespace

Verdict check_schedule(const OverlapPlan& plan) {
  const std::int64_t num_tiles = plan.grid.num_tiles();
  std::vector<std::int64_t> position_of(index(num_tiles), -1);
  for (std::int64_t p = 0; p < std::ssize(plan.schedule); ++p) {
    const std::int64_t tile = plan.schedule[index(p)];
    if (tile < 0 || tile >= num_tiles) {
      return no("position {} of the schedule holds tile {}, which is not in [0, {})", p, tile, num_tiles);
    }
    if (position_of[index(tile)] >= 0) {
      return no("tile {} is scheduled twice, at positions {} and {}", tile, position_of[index(tile)], p);
    }
    position_of[index(tile)] = p;
  }
  const auto missing = std::ranges::find(position_of, -1);
  if (missing != position_of.end()) return no("tile {} is not scheduled", missing - position_of.begin());
  return {};
}

Verdict check_groups(const OverlapPlan& plan, Facts& facts) {
  const std::int64_t positions = std::ssize(plan.schedule);
  facts.group_of_tile.assign(plan.schedule.size(), 0);
  std::int64_t next = 0;
  for (std::int64_t g = 0; g < std::ssize(plan.groups); ++g) {
    const WaveGroup& group = plan.groups[index(g)];
    if (group.first_position != next) {
      return no("group {} begins at position {}, but the groups before it end at position {}", g,
                group.first_position, next);
    }
    if (group.num_tiles < 0 || group.num_tiles > positions - next) {
      return no("group {} has {} tiles from position {} on, but the schedule has {}", g, group.num_tiles,
                next, positions);
    }
    for (; next < group.first_position + group.num_tiles; ++next) {
      facts.group_of_tile[index(plan.schedule[index(next)])] = g;
    }
  }
  if (next != positions) {
    return no("the groups end at position {}, but the schedule has {}: tile {} is in no group", next,
              positions, plan.schedule[index(next)]);
  }
  return {};
}

Verdict check_placement(const OverlapPlan& plan, Facts& facts) {
  if (Verdict v = check_first_segment(plan); !v) return v;
  facts.packed.reserve(plan.placement.segments.size());
  // In schedule order, in which builders mostly place, so that there is little to sort.
  for (const std::int64_t tile : plan.schedule) {
    if (Verdict v = check_segments(plan, tile, facts); !v) return v;
  }
  if (Verdict v = check_bijection(plan, facts); !v) return v;
  return check_groups_contiguous(plan, facts);
}

}  // namespace flashoverlap::plan

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/fail.h"
#include "plan/arithmetic.h"
#include "plan/builder.h"
#include "plan/moe_world.h"

/// The row layout, first part of Algorithm 1 of arXiv 2607.19539, and what follows from sizes alone.
namespace flashoverlap {
namespace {

using core::fail;
using plan::at_least;
using plan::index;

/// Owners in the order of their groups: the other ranks, then the rank itself. Expert-major groups are
/// computed in this order, so each rank begins with the one after it: were all to begin with rank 0, all
/// would send to rank 0 at a time. Owner-major rows are in the order of ranks, as an all-to-all delivers
/// them.
std::vector<std::int32_t> owners_of(std::int32_t world_size, std::int32_t rank, MoeOrder order) {
  std::vector<std::int32_t> owners(index(world_size));
  std::iota(owners.begin(), owners.end(), 0);
  if (order == MoeOrder::kExpertMajor) {
    std::rotate(owners.begin(), owners.begin() + (rank + 1) % world_size, owners.end());
  } else {
    std::rotate(owners.begin() + rank, owners.begin() + rank + 1, owners.end());
  }
  return owners;
}

void check_combination(const MoePlanOptions& options) {
  if (options.padding == MoePadding::kShared && options.order != MoeOrder::kExpertMajor) {
    fail(ErrorKind::kBadArgument,
         "padding 'shared' lets tiles run over the owners of an expert, so it needs order 'expert-major', "
         "got '{}'",
         name_of(options.order));
  }
  if (options.transport != MoeTransport::kCollective) return;
  if (options.order != MoeOrder::kOwnerMajor || options.padding != MoePadding::kRagged) {
    fail(ErrorKind::kBadArgument,
         "an all-to-all leaves the rows of each rank together, so transport 'collective' needs order "
         "'owner-major' "
         "and padding 'ragged', got '{}' and '{}'",
         name_of(options.order), name_of(options.padding));
  }
}

}  // namespace

namespace plan {

void check_moe(const MoePlanOptions& options, const MoeCounts& counts) {
  check_rank(options.rank, options.world_size);
  at_least("num_experts", options.num_experts, 1);
  at_least("tile_m", options.tile_m, 1);
  at_least("tile_n", options.tile_n, 1);
  at_least("segment_bands", options.segment_bands, 1);
  at_least("collective_groups", options.collective_groups, 1);
  at_least("compute_units", options.resources.compute_units, 1);
  at_least("communication_units", options.resources.communication_units, 0);
  check_combination(options);
  if (counts.world_size != options.world_size || counts.num_experts != options.num_experts ||
      std::ssize(counts.rows) != counts.world_size * counts.num_experts) {
    fail(ErrorKind::kBadArgument, "counts are {} numbers for {} ranks and {} experts; expected {} x {}",
         counts.rows.size(), counts.world_size, counts.num_experts, options.world_size, options.num_experts);
  }
  constexpr std::int64_t kMaxRows = std::int64_t{1} << 40U;  // sums of rows times columns stay in 64 bits
  std::int64_t total = 0;
  for (std::size_t i = 0; i < counts.rows.size(); ++i) {
    const auto e = static_cast<std::int64_t>(i) % counts.num_experts;
    if (counts.rows[i] < 0 || counts.rows[i] > kMaxRows || (total += counts.rows[i]) > kMaxRows) {
      fail(ErrorKind::kBadArgument, "rank {} sends {} rows to expert {}; expected 0 to 2^40 rows in all",
           static_cast<std::int64_t>(i) / counts.num_experts, counts.rows[i], e);
    }
  }
}

std::vector<MoeGroup> place_groups(const MoePlanOptions& options, const MoeCounts& counts,
                                   std::int32_t rank) {
  const std::int64_t begin = flashoverlap::first_expert(options.num_experts, options.world_size, rank);
  const std::int64_t end = flashoverlap::first_expert(options.num_experts, options.world_size, rank + 1);
  const bool pads = options.padding == MoePadding::kPaper && options.world_size > 1;
  std::vector<MoeGroup> groups;
  groups.reserve(index((end - begin) * options.world_size));
  std::int64_t next_row = 0;
  const auto add = [&](std::int64_t expert, std::int32_t owner) {
    const std::int64_t rows = counts.at(owner, expert);
    const std::int64_t padded = pads ? ceil_div(rows, options.tile_m) * options.tile_m : rows;
    groups.push_back({expert, owner, next_row, rows, padded, 0});
    next_row += padded;
  };
  const std::vector<std::int32_t> owners = owners_of(options.world_size, rank, options.order);
  if (options.order == MoeOrder::kExpertMajor) {
    for (std::int64_t expert = begin; expert < end; ++expert) {
      for (const std::int32_t owner : owners) add(expert, owner);
    }
  } else {
    for (const std::int32_t owner : owners) {
      for (std::int64_t expert = begin; expert < end; ++expert) add(expert, owner);
    }
  }
  return groups;
}

}  // namespace plan

std::vector<std::int64_t> count_rows(const MoeRouting& routing) {
  check_routing(routing);
  std::vector<std::int64_t> rows(index(routing.num_experts), 0);
  for (const std::int32_t expert : routing.experts) {
    if (expert >= 0) ++rows[index(expert)];
  }
  return rows;
}

MoeCounts with_capacity(const MoeCounts& counts, std::int64_t capacity) {
  at_least("capacity", capacity, 0);
  if (capacity == 0) return counts;
  MoeCounts kept = counts;
  for (std::int64_t expert = 0; expert < counts.num_experts; ++expert) {
    std::int64_t left = capacity;
    for (std::int64_t rank = 0; rank < counts.world_size; ++rank) {
      std::int64_t& rows = kept.rows[index(rank * counts.num_experts + expert)];
      rows = std::min(rows, left);
      left -= rows;
    }
  }
  return kept;
}

MoePlanOptions serial_moe_options(const MoePlanOptions& options) {
  MoePlanOptions serial = options;
  serial.padding = MoePadding::kRagged;
  serial.order = MoeOrder::kOwnerMajor;
  serial.transport = MoeTransport::kCollective;
  serial.collective_groups = 1;
  return serial;
}

std::int64_t first_expert(std::int64_t num_experts, std::int32_t world_size, std::int32_t rank) {
  return plan::share_begin(num_experts, world_size, rank);
}

MoeLayout moe_layout(const MoePlanOptions& options, const MoeCounts& counts) {
  plan::check_moe(options, counts);
  MoeLayout layout;
  layout.groups = plan::place_groups(options, counts, options.rank);
  const std::int64_t begin = first_expert(options.num_experts, options.world_size, options.rank);
  const std::int64_t end = first_expert(options.num_experts, options.world_size, options.rank + 1);
  // owner_row[owner][expert]: rows of the owner for the experts before.
  std::vector<std::int64_t> next(index(options.world_size), 0);
  std::vector<std::int64_t> owner_row;
  for (std::int64_t owner = 0; owner < options.world_size; ++owner) {
    std::int64_t& row = next[index(owner)];
    for (std::int64_t expert = 0; expert < begin; ++expert) row += counts.at(owner, expert);
    for (std::int64_t expert = begin; expert < end; ++expert) {
      owner_row.push_back(row);
      row += counts.at(owner, expert);
    }
  }
  for (MoeGroup& group : layout.groups) {
    group.owner_row = owner_row[index(group.owner * (end - begin) + group.expert - begin)];
    layout.rows += group.padded_rows;
    layout.valid_rows += group.rows;
    if (group.owner == options.rank) layout.own_rows += group.rows;
  }
  for (std::int64_t expert = 0; expert < options.num_experts; ++expert) {
    layout.send_rows += counts.at(options.rank, expert);
  }
  return layout;
}

std::vector<MoeSegment> moe_segments(std::int64_t remote_bands, std::int64_t local_bands,
                                     std::int64_t inner_bands) {
  at_least("remote_bands", remote_bands, 0);
  at_least("local_bands", local_bands, 0);
  at_least("inner_bands", inner_bands, 1);
  std::vector<MoeSegment> segments;
  std::int64_t band = 0;
  const auto add = [&](std::int64_t bands) {
    segments.push_back({band, bands});
    band += bands;
  };
  if (remote_bands > 0) add(1);
  while (band < remote_bands - 1) add(std::min(inner_bands, remote_bands - 1 - band));
  if (remote_bands > 1) add(1);
  const std::int64_t bands = remote_bands + local_bands;
  while (band < bands) add(std::min(inner_bands, bands - band));
  return segments;
}

MoeWaste moe_waste(const MoePlanOptions& options, const MoeCounts& counts) {
  plan::check_moe(options, counts);
  MoeWaste waste;
  std::int64_t expert = -1;
  std::vector<bool> seen(index(options.num_experts), false);
  std::int64_t in_expert = 0;
  const auto close_expert = [&] {
    if (options.padding == MoePadding::kShared) waste.bands += plan::ceil_div(in_expert, options.tile_m);
    in_expert = 0;
  };
  for (const MoeGroup& group : plan::place_groups(options, counts, options.rank)) {
    if (group.expert != expert) close_expert();
    expert = group.expert;
    in_expert += group.rows;
    waste.valid_rows += group.rows;
    if (options.padding != MoePadding::kShared) waste.bands += plan::ceil_div(group.rows, options.tile_m);
    if (group.rows > 0 && !seen[index(expert)]) ++waste.experts;
    if (group.rows > 0) seen[index(expert)] = true;
  }
  close_expert();
  waste.computed_rows = waste.bands * options.tile_m;
  return waste;
}

std::int64_t moe_consumer_budget(std::int64_t units, double bytes, double compute_us, double unit_gbps,
                                 double link_gbps) {
  at_least("units", units, 2);
  const auto check = [](const char* name, double value, bool zero) {
    if (std::isfinite(value) && (value > 0 || (zero && value == 0))) return;
    fail(ErrorKind::kBadArgument, "{} is {}; a finite number {} 0 is expected", name, value,
         zero ? ">=" : ">");
  };
  check("bytes", bytes, true);
  check("compute_us", compute_us, true);
  check("unit_gbps", unit_gbps, false);
  check("link_gbps", link_gbps, false);
  if (bytes == 0) return 1;
  for (std::int64_t consumers = 1; consumers < units; ++consumers) {
    const double gbps = std::min(static_cast<double>(consumers) * unit_gbps, link_gbps);
    const double send_us = bytes / gbps * 1e-3;
    const double left_us = compute_us * static_cast<double>(units) / static_cast<double>(units - consumers);
    // More than saturate the link cannot help.
    if (send_us <= left_us || gbps >= link_gbps) return consumers;
  }
  return units - 1;
}

}  // namespace flashoverlap

#include "plan/moe_world.h"

#include <algorithm>

#include "core/fail.h"
#include "plan/agreement.h"
#include "plan/arithmetic.h"

namespace flashoverlap {
namespace plan {
namespace {

/// Rows of an owner that lie together at the receiver and at the owner travel together.
std::vector<MoeArrival> arrivals_of(const MoePlanOptions& options, const MoeLayout& layout) {
  std::vector<MoeArrival> arrivals;
  for (const MoeGroup& group : layout.groups) {
    if (group.owner == options.rank || group.rows == 0) continue;
    const bool joins = options.order == MoeOrder::kOwnerMajor && !arrivals.empty() &&
                       arrivals.back().owner == group.owner &&
                       arrivals.back().row_begin + arrivals.back().rows == group.row_begin;
    if (joins) {
      arrivals.back().rows += group.rows;
    } else {
      arrivals.push_back({group.owner, group.row_begin, group.rows, group.owner_row});
    }
  }
  std::ranges::stable_sort(arrivals, {}, &MoeArrival::owner);
  return arrivals;
}

/// The parts of rows [begin, end) of one expert, by owner; `group` is the first group that can have any.
std::vector<MoeBandPart> parts_of(const std::vector<MoeGroup>& groups, std::size_t group, std::int64_t expert,
                                  std::int64_t begin, std::int64_t end) {
  std::vector<MoeBandPart> parts;
  for (; group < groups.size() && groups[group].expert == expert && groups[group].row_begin < end; ++group) {
    const MoeGroup& g = groups[group];
    const std::int64_t first = std::max(begin, g.row_begin);
    const std::int64_t last = std::min(end, g.row_begin + g.rows);
    if (first >= last) continue;
    parts.push_back({g.owner, g.owner_row + first - g.row_begin, first, last - first});
  }
  return parts;
}

void add_bands(std::vector<PlacedBand>& bands, const MoePlanOptions& options,
               const std::vector<MoeGroup>& groups, std::size_t group, std::int64_t problem,
               std::int64_t begin, std::int64_t rows) {
  for (std::int64_t row = 0; row < rows; row += options.tile_m) {
    PlacedBand placed;
    placed.band.expert = groups[group].expert;
    placed.band.row_begin = begin + row;
    placed.band.rows = std::min(options.tile_m, rows - row);
    placed.band.parts =
        parts_of(groups, group, placed.band.expert, begin + row, begin + row + placed.band.rows);
    placed.problem = problem;
    placed.row_in_problem = row / options.tile_m;
    placed.remote = placed.band.remote(options.rank);
    bands.push_back(std::move(placed));
  }
}

/// In row order.
std::vector<PlacedBand> cut_into_bands(const MoePlanOptions& options, const MoeLayout& layout) {
  std::vector<PlacedBand> bands;
  std::int64_t problem = 0;
  for (std::size_t g = 0; g < layout.groups.size(); ++problem) {
    const MoeGroup& group = layout.groups[g];
    std::int64_t rows = group.padded_rows;
    std::size_t next = g + 1;
    while (options.padding == MoePadding::kShared && next < layout.groups.size() &&
           layout.groups[next].expert == group.expert) {
      rows += layout.groups[next++].padded_rows;
    }
    add_bands(bands, options, layout.groups, g, problem, group.row_begin, rows);
    g = next;
  }
  return bands;
}

MoeOwnRows own_rows_of(const MoePlanOptions& options, const MoeLayout& layout) {
  MoeOwnRows own;
  if (options.padding == MoePadding::kShared) return own;  // tiles have rows of several owners
  for (const MoeGroup& group : layout.groups) {
    if (group.owner != options.rank || group.rows == 0) continue;
    const std::int64_t shift = group.owner_row - group.row_begin;
    if (own.rows > 0 && shift != own.shift) return {};
    if (own.rows == 0) own = {group.owner_row, shift, 0};
    own.rows += group.rows;
  }
  return own;
}

/// What goes to one owner joins where it lies together there, be there bands of other owners in between: with
/// expert-major bands an owner would otherwise get a message for each expert.
std::vector<MoeRun> runs_of(const std::vector<PlacedBand>& bands, const MoeSegment& segment) {
  const auto part_of = [&](const MoeRun::Member& member) -> const MoeBandPart& {
    return bands[member.band].band.parts[member.part];
  };
  std::vector<std::vector<MoeRun::Member>> by_destination;  // in the order in which they appear
  std::map<std::int32_t, std::size_t> place;
  const auto end = index(segment.first_band + segment.num_bands);
  for (std::size_t b = index(segment.first_band); b < end; ++b) {
    for (std::size_t p = 0; p < bands[b].band.parts.size(); ++p) {
      const auto [entry, is_first] = place.try_emplace(part_of({b, p}).destination, by_destination.size());
      if (is_first) by_destination.emplace_back();
      by_destination[entry->second].push_back({b, p});
    }
  }
  std::vector<MoeRun> runs;
  for (std::vector<MoeRun::Member>& members : by_destination) {
    std::ranges::sort(members, {}, [&](const auto& member) { return part_of(member).destination_row; });
    for (const MoeRun::Member& member : members) {
      const MoeBandPart& part = part_of(member);
      const bool joins = !runs.empty() && runs.back().destination == part.destination &&
                         runs.back().destination_row + runs.back().rows == part.destination_row;
      if (!joins) runs.push_back({part.destination, part.destination_row, 0, {}});
      runs.back().rows += part.rows;
      runs.back().parts.push_back(member);
    }
  }
  return runs;
}

void order_by_expert(std::vector<PlacedBand>& bands) {
  std::map<std::int64_t, std::int64_t> remote;
  for (const PlacedBand& placed : bands) remote[placed.band.expert] += placed.remote ? 1 : 0;
  std::ranges::stable_sort(bands, [&](const PlacedBand& a, const PlacedBand& b) {
    if (a.remote != b.remote) return a.remote;
    return remote[a.band.expert] > remote[b.band.expert];
  });
}

void order_by_owner(const MoePlanOptions& options, std::vector<PlacedBand>& bands) {
  const auto distance = [&](const PlacedBand& placed) {
    const std::int32_t owner = placed.band.parts.front().destination;
    const std::int32_t steps = (owner - options.rank + options.world_size) % options.world_size;
    return steps == 0 ? options.world_size : steps;
  };
  std::ranges::stable_sort(
      bands, [&](const PlacedBand& a, const PlacedBand& b) { return distance(a) < distance(b); });
}

}  // namespace

MoeWorld::MoeWorld(const MoePlanOptions& options, const MoeCounts& counts)
    : options_(options), counts_(counts) {
  check_moe(options, counts);
}

MoePlanOptions MoeWorld::options_of(std::int32_t rank) const {
  MoePlanOptions options = options_;
  options.rank = rank;
  return options;
}

std::int64_t MoeWorld::first_expert(std::int32_t rank) const {
  return flashoverlap::first_expert(options_.num_experts, options_.world_size, rank);
}

const MoeLayout& MoeWorld::layout(std::int32_t rank) {
  const auto found = layouts_.find(rank);
  if (found != layouts_.end()) return found->second;
  return layouts_.emplace(rank, moe_layout(options_of(rank), counts_)).first->second;
}

const std::vector<MoeArrival>& MoeWorld::arrivals(std::int32_t rank) {
  const auto found = arrivals_.find(rank);
  if (found != arrivals_.end()) return found->second;
  return arrivals_.emplace(rank, arrivals_of(options_of(rank), layout(rank))).first->second;
}

const std::vector<PlacedBand>& MoeWorld::bands(std::int32_t rank) {
  const auto found = bands_.find(rank);
  if (found != bands_.end()) return found->second;
  const MoePlanOptions options = options_of(rank);
  std::vector<PlacedBand> bands = cut_into_bands(options, layout(rank));
  if (options.order == MoeOrder::kExpertMajor) {
    order_by_expert(bands);
  } else {
    order_by_owner(options, bands);
  }
  return bands_.emplace(rank, std::move(bands)).first->second;
}

const MoeOwnRows& MoeWorld::own_rows(std::int32_t rank) {
  const auto found = own_rows_.find(rank);
  if (found != own_rows_.end()) return found->second;
  return own_rows_.emplace(rank, own_rows_of(options_of(rank), layout(rank))).first->second;
}

std::int64_t MoeWorld::received_row(std::int32_t rank, std::int64_t output_row) {
  const MoeOwnRows& own = own_rows(rank);
  return output_row < own.output_row + own.rows ? output_row : output_row - own.rows;
}

const std::vector<MoeSegment>& MoeWorld::segments(std::int32_t rank) {
  const auto found = segments_.find(rank);
  if (found != segments_.end()) return found->second;
  const std::vector<PlacedBand>& all = bands(rank);
  const std::int64_t remote = std::ranges::count_if(all, &PlacedBand::remote);
  const std::int64_t own = std::ssize(all) - remote;
  const bool stay = own_rows(rank).rows > 0;
  std::vector<MoeSegment> segments = moe_segments(remote, stay ? 0 : own, options_.segment_bands);
  if (stay) segments.push_back({remote, own});
  return segments_.emplace(rank, std::move(segments)).first->second;
}

const std::vector<std::vector<MoeRun>>& MoeWorld::runs(std::int32_t rank) {
  const auto found = runs_.find(rank);
  if (found != runs_.end()) return found->second;
  std::vector<std::vector<MoeRun>> runs;
  const bool own_stay = own_rows(rank).rows > 0;
  for (const MoeSegment& segment : segments(rank)) {
    const bool stays = own_stay && !bands(rank)[index(segment.first_band)].remote;
    runs.push_back(stays ? std::vector<MoeRun>{} : runs_of(bands(rank), segment));
  }
  return runs_.emplace(rank, std::move(runs)).first->second;
}

const std::vector<MoeIncoming>& MoeWorld::incoming(std::int32_t rank) {
  if (incoming_.empty()) {
    incoming_.resize(index(options_.world_size));
    for (std::int32_t source = 0; source < options_.world_size; ++source) {
      for (const auto& of_segment : runs(source)) {
        for (const MoeRun& run : of_segment) incoming_[index(run.destination)].push_back({source, &run});
      }
    }
  }
  return incoming_[index(rank)];
}

std::int64_t MoeWorld::first_slice(std::int32_t source, std::int32_t destination) {
  const std::vector<MoeIncoming>& all = incoming(destination);
  return std::ranges::lower_bound(all, source, {}, &MoeIncoming::source) - all.begin();
}

std::uint64_t MoeWorld::agreement(std::string_view operation, std::int64_t n, std::int64_t k) const {
  PlanOptions shared;
  shared.world_size = options_.world_size;
  shared.dtype = options_.dtype;
  shared.n = n;
  shared.k = k;
  shared.tile_m = options_.tile_m;
  shared.tile_n = options_.tile_n;
  AgreementHash hash = hash_options(operation, shared, {});
  hash.add(options_.num_experts);
  hash.add(name_of(options_.padding));
  hash.add(name_of(options_.order));
  hash.add(name_of(options_.transport));
  hash.add(options_.segment_bands);
  hash.add(options_.collective_groups);
  hash.add(std::span(counts_.rows));
  return hash.value();
}

std::vector<Problem> moe_problems(const MoePlanOptions& options, const MoeLayout& layout, std::int64_t n,
                                  bool with_padding) {
  const std::int64_t first =
      flashoverlap::first_expert(options.num_experts, options.world_size, options.rank);
  std::vector<Problem> problems;
  for (const MoeGroup& group : layout.groups) {
    const std::int64_t rows = with_padding ? group.padded_rows : group.rows;
    if (options.padding == MoePadding::kShared && !problems.empty() &&
        problems.back().weight == group.expert - first) {
      problems.back().rows += rows;
      continue;
    }
    problems.push_back({.row_begin = group.row_begin,
                        .rows = rows,
                        .col_begin = 0,
                        .cols = n,
                        .weight = group.expert - first});
  }
  return problems;
}

PutChannels::PutChannels(const OverlapPlan& plan)
    : rank_(plan.rank),
      world_size_(plan.world_size),
      consumers_(static_cast<std::int32_t>(std::max<std::int64_t>(1, plan.resources.communication_units))),
      puts_(index(plan.world_size), 0) {}

std::int32_t PutChannels::next(std::int32_t peer) {
  const std::int32_t others = world_size_ - 1;
  const std::int32_t steps = (peer - rank_ - 1 + world_size_) % world_size_;
  // What a rank puts to itself stands behind all others and moves over no link.
  if (consumers_ <= others || steps == others) return steps % consumers_;
  // Those left over serve the ranks whose turn is last: less time is left for what they get.
  const std::int32_t each = consumers_ / others;
  const std::int32_t first_with_more = others - consumers_ % others;
  const std::int32_t own = each + (steps >= first_with_more ? 1 : 0);
  const std::int32_t turn = puts_[index(peer)]++ % own;
  return turn < each ? steps + others * turn : others * each + steps - first_with_more;
}

TileIndex::TileIndex(const std::vector<Problem>& problems, std::int64_t n, std::int64_t tile_m,
                     std::int64_t tile_n)
    : cols(ceil_div(n, tile_n)) {
  std::int64_t next = 0;
  for (const Problem& problem : problems) {
    first.push_back(next);
    next += ceil_div(problem.rows, tile_m) * cols;
  }
}

}  // namespace plan

std::vector<MoeBand> moe_bands(const MoePlanOptions& options, const MoeCounts& counts) {
  plan::MoeWorld world(options, counts);
  std::vector<MoeBand> bands;
  for (const plan::PlacedBand& placed : world.bands(options.rank)) bands.push_back(placed.band);
  return bands;
}

}  // namespace flashoverlap

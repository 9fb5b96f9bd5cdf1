#include <fmt/core.h>

#include <algorithm>

#include "sim/simulation.h"

namespace flashoverlap::sim {
namespace {

constexpr int kLongestPath = 32;

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

}  // namespace

/// Walks back from the rank that finishes last: from each transfer to what let it begin, from each group to
/// the slice that held it up, until the start.
std::vector<std::string> Simulation::critical_path() const {
  std::vector<std::string> path;
  std::int64_t number = 0;
  for (std::int64_t r = 1; r < static_cast<std::int64_t>(ranks_.size()); ++r) {
    if (ranks_[at(r)].result.finish_us > ranks_[at(number)].result.finish_us) number = r;
  }
  if (ranks_.empty()) return path;
  std::int64_t transfer = -1;
  for (std::size_t t = 0; t < ranks_[at(number)].transfers.size(); ++t) {
    const double end = ranks_[at(number)].transfers[t].end_us;
    if (end >= ranks_[at(number)].last_tile_us &&
        (transfer < 0 || end > ranks_[at(number)].transfers[at(transfer)].end_us)) {
      transfer = static_cast<std::int64_t>(t);
    }
  }
  if (transfer < 0) {
    const RankState& rank = ranks_[at(number)];
    std::string text = fmt::format("rank {}'s last tile is done at {:.1f} us, after all its communication",
                                   number, rank.last_tile_us);
    std::int64_t slice = -1;
    for (std::size_t group = 0; group < rank.group_done_us.size(); ++group) {
      if (rank.group_done_us[group] == rank.last_tile_us) {
        slice = rank.compute->held_up_by(static_cast<std::int64_t>(group));
      }
    }
    if (slice >= 0) {
      text += fmt::format("; slice {} held it up", slice);
      transfer = rank.slice_from_transfer[at(slice)];
      number = rank.slice_from_rank[at(slice)];
    }
    path.push_back(text);
  }
  while (transfer >= 0 && static_cast<int>(path.size()) < kLongestPath) {
    const TransferState& state = ranks_[at(number)].transfers[at(transfer)];
    std::string text =
        fmt::format("rank {}'s {} ({:.1f} to {:.1f} us) ", number,
                    describe(*ranks_[at(number)].plan, transfer), state.begin_us, state.end_us);
    // The rank that came last decides; its own call of the same collective or message is the one to follow.
    if (state.last_rank >= 0 && state.last_rank != number) {
      for (std::size_t t = 0; t < ranks_[at(state.last_rank)].transfers.size(); ++t) {
        const TransferState& other = ranks_[at(state.last_rank)].transfers[t];
        if (other.begin_us == state.begin_us && other.end_us == state.end_us &&
            other.last_rank == state.last_rank) {
          number = state.last_rank;
          transfer = static_cast<std::int64_t>(t);
          break;
        }
      }
    }
    const RankState& rank = ranks_[at(number)];
    const TransferState& own = rank.transfers[at(transfer)];
    const Transfer& planned = rank.plan->transfers[at(transfer)];
    const Channel& channel = rank.channels.at(planned.channel);
    const auto place = std::find(channel.transfers.begin(), channel.transfers.end(), transfer);
    if (own.triggered_us < own.issued_us && place != channel.transfers.begin()) {
      transfer = *(place - 1);
      path.push_back(text +
                     fmt::format("waits for rank {}'s {} before it", number, describe(*rank.plan, transfer)));
      continue;
    }
    if (planned.trigger.kind == TriggerKind::kStart) {
      path.push_back(text + "begins with the call");
      break;
    }
    std::int64_t slice = planned.trigger.index;
    if (planned.trigger.kind == TriggerKind::kGroup) {
      const std::int64_t group = planned.trigger.index;
      const WaveGroup& tiles = rank.plan->groups[at(group)];
      text += fmt::format("waits for rank {}'s group {}, complete at {:.1f} us", number, group,
                          rank.group_done_us[at(group)]);
      if (tiles.num_tiles > 0) {
        text += fmt::format(" with wave {}", rank.plan->wave_of(tiles.first_position + tiles.num_tiles - 1));
      }
      slice = rank.compute->held_up_by(group);
      if (slice < 0) {
        path.push_back(text);
        break;
      }
      text += fmt::format(", which slice {} held up", slice);
    } else {
      text += fmt::format("waits for slice {} at rank {}", slice, number);
    }
    path.push_back(text);
    transfer = rank.slice_from_transfer[at(slice)];
    number = rank.slice_from_rank[at(slice)];
  }
  return path;
}

}  // namespace flashoverlap::sim

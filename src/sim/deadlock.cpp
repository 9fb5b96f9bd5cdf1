#include <fmt/core.h>

#include "core/fail.h"
#include "sim/simulation.h"

namespace flashoverlap::sim {

/// Nothing is left to happen: every rank must be through.
void Simulation::require_finished() const {
  constexpr int kMostListed = 8;
  std::string list;
  std::int64_t num_stuck = 0;
  for (std::int64_t number = 0; number < static_cast<std::int64_t>(ranks_.size()); ++number) {
    const RankState& rank = ranks_[static_cast<std::size_t>(number)];
    if (rank.transfers_left == 0 && rank.compute->done()) continue;
    if (++num_stuck <= kMostListed) list += "; " + stuck(number);
  }
  if (num_stuck == 0) return;
  if (num_stuck > kMostListed) list += fmt::format("; and {} more ranks", num_stuck - kMostListed);
  core::fail(ErrorKind::kBadArgument, "deadlock: {} of {} ranks cannot go on{}", num_stuck, ranks_.size(),
             list);
}

std::string Simulation::stuck(std::int64_t number) const {
  const RankState& rank = ranks_[static_cast<std::size_t>(number)];
  std::string text = fmt::format("rank {}:", number);
  if (!rank.compute->done()) {
    const std::string reason = rank.compute->stuck();
    text += " " + (reason.empty() ? std::string("its tiles are not done") : reason);
  }
  for (const auto& [channel_number, channel] : rank.channels) {
    if (channel.head == channel.transfers.size()) continue;
    const std::int64_t transfer = channel.transfers[channel.head];
    const Transfer& head = rank.plan->transfers[static_cast<std::size_t>(transfer)];
    text += fmt::format("{} channel {} at {}, which ", text.back() == ':' ? "" : ",", channel_number,
                        describe(*rank.plan, transfer));
    if (!rank.transfers[static_cast<std::size_t>(transfer)].issued) {
      text += head.trigger.kind == TriggerKind::kGroup
                  ? fmt::format("waits for group {}", head.trigger.index)
                  : fmt::format("waits for slice {}", head.trigger.index);
    } else if (head.peer >= 0) {
      text += fmt::format("waits for rank {}'s side of it", head.peer);
    } else {
      std::string missing;
      const auto meeting = meetings_.find({channel_number, channel.collectives_issued - 1});
      for (std::int64_t other = 0; other < static_cast<std::int64_t>(ranks_.size()) && missing.size() < 60;
           ++other) {
        bool there = false;
        if (meeting != meetings_.end()) {
          for (const auto& [member, call] : meeting->second.calls) there |= member == other;
        }
        if (!there) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", other);
      }
      text += fmt::format("waits for ranks {}", missing);
    }
  }
  return text;
}

}  // namespace flashoverlap::sim

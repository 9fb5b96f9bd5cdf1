#pragma once

#include <atomic>
#include <compare>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/call.h"
#include "comm/link.h"
#include "comm/pieces.h"

namespace flashoverlap::comm {

struct Group;

enum class MeetingKind { kCollective, kPair, kSubgroup };

/// Which calls belong together: the n-th collective of a group; the n-th send from one rank to another and
/// the n-th receive there from it; the n-th subgroup of the same ranks.
struct MeetingKey {
  std::int64_t group_id = 0;
  MeetingKind kind = MeetingKind::kCollective;
  std::vector<int>
      ranks;  ///< Group ranks: (source, destination), or the sorted ranks; empty for collectives.
  std::uint64_t number = 0;
  auto operator<=>(const MeetingKey&) const = default;
};

/// One call of all its participants. Guarded by the world's mutex but for `next_piece` and, while anybody
/// works, `calls` and `pieces`, which do not change any more then.
///
/// The last to arrive makes it ready. From then on whoever is awake takes pieces, so that a call does not
/// wait for a thread that the system has not scheduled yet. It is done when no piece is left and nobody
/// works. Nobody leaves while somebody works, not even after a failure: the worker reads and writes the
/// leaver's buffers.
struct Meeting {
  MeetingKey key;
  std::shared_ptr<Group> group;
  std::vector<int> participants;                   ///< World ranks by slot.
  std::vector<std::shared_ptr<const Call>> calls;  ///< By slot; null: not here yet.
  std::vector<bool> dropped;                       ///< By slot: will never come, see World::drop.
  std::size_t num_arrived = 0;
  bool ready = false;
  std::vector<Piece> pieces;
  std::atomic<std::size_t> next_piece{0};
  int num_working = 0;
  bool done = false;
  std::vector<TimePoint> completions;  ///< By slot; empty: not paced.
  std::shared_ptr<Group> new_group;    ///< kSubgroup.
  std::size_t num_left = 0;
  std::condition_variable changed;
};

}  // namespace flashoverlap::comm

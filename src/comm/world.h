#pragma once

#include <chrono>
#include <compare>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/call.h"
#include "comm/link.h"
#include "comm/meeting.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/symmetric_heap.h"

namespace flashoverlap::comm {

/// The ranks of one communicator, in the order that gives them their ranks there. Shared by these ranks;
/// everything but the two constants is guarded by the world's mutex.
struct Group {
  Group(std::int64_t group_id, std::vector<int> world_ranks);

  const std::int64_t id;
  const std::vector<int> members;  ///< World ranks.

  /// Calls issued so far, which number the next one: per rank, and per (source, destination) of this group.
  std::vector<std::uint64_t> collectives;
  std::map<std::pair<int, int>, std::uint64_t> sends;
  std::map<std::pair<int, int>, std::uint64_t> receives;
  /// Per (rank, sorted list of the subgroup's ranks).
  std::map<std::pair<int, std::vector<int>>, std::uint64_t> subgroups;
};

/// A call between being issued and being done.
struct Issued {
  std::shared_ptr<Group> group;
  MeetingKey key;
  std::vector<int> participants;  ///< Group ranks, by slot.
  std::size_t slot = 0;
  std::shared_ptr<const Call> call;
};

/// Memory that one rank has opened for puts. Guarded by the world's mutex; while `num_copying` counts
/// somebody, who copies without the mutex, it stays open.
struct OpenWindow {
  SymmetricHeap::Window window;
  std::int64_t num_missing = 0;  ///< Puts that have not come.
  int num_copying = 0;
  TimePoint last_arrival{};  ///< Or when it was opened.
};

/// Which windows belong together: the n-th of each rank of a group.
struct WindowKey {
  std::int64_t group_id = 0;
  int rank = 0;  ///< In the group.
  std::uint64_t number = 0;
  auto operator<=>(const WindowKey&) const = default;
};

/// One put, by ranks of the group.
struct Put {
  int source = 0;
  int destination = 0;
  std::uint64_t number = 0;  ///< Of the window.
  std::int64_t buffer = 0;
  std::int64_t offset_bytes = 0;
  const void* from = nullptr;
  std::int64_t bytes = 0;
  std::int64_t slice = -1;
};

/// What the ranks of one process share: where their calls meet, and who failed. A world and all its subgroups
/// share one fate, since a rank that is dead is dead for every group.
///
/// All waiting is on condition variables. One mutex guards everything; it is never held while data is moved.
class World {
 public:
  World(int size, const LinkModel& link);

  /// Takes a number for the call and notes it as `rank`'s last. `ranks`: the participants of a send (source,
  /// destination), a receive (likewise) or a subgroup (sorted) as group ranks; unused for collectives. Throws
  /// when the world has failed.
  Issued issue(const std::shared_ptr<Group>& group, int group_rank, std::shared_ptr<const Call> call,
               const std::vector<int>& ranks);

  /// Waits for the other participants, does a share of the work, and returns when the call is complete on
  /// this rank. Throws the world's failure, or makes one: after `timeout`, on a mismatch, or when a
  /// participant can no longer come.
  std::shared_ptr<const Meeting> meet(const Issued& issued, std::chrono::milliseconds timeout);

  /// The stream has dropped the call instead of making it, because it met an error or was destroyed. Whoever
  /// waits for it fails.
  void drop(const Issued& issued) noexcept;

  /// See SymmetricHeap. In world_windows.cpp.
  void open_window(const std::shared_ptr<Group>& group, const WindowKey& key, SymmetricHeap::Window window);
  void put(const std::shared_ptr<Group>& group, const Put& put, std::shared_ptr<const Call> call,
           std::chrono::milliseconds timeout);
  void await_arrivals(const std::shared_ptr<Group>& group, const WindowKey& key,
                      std::shared_ptr<const Call> call, std::chrono::milliseconds timeout);
  void close_window(const WindowKey& key) noexcept;

  void abort(int world_rank, const std::string& reason) noexcept;
  /// `world_rank` issues no more calls; whoever waits for one that it has not issued fails.
  void finish(int world_rank);

  struct Failure {
    ErrorKind kind;
    std::string message;
    int culprit;  ///< World rank that has an error of its own from which this one follows; -1: none is known.
  };
  std::optional<Failure> failure();

  [[nodiscard]] const std::shared_ptr<Group>& whole() const { return whole_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct RankState {
    std::shared_ptr<const Call> last_issued;
    std::shared_ptr<const Call> last_reached;  ///< By one of its streams.
    std::vector<const Meeting*> waiting_in;    ///< Where its streams wait for others.
    TimePoint busy_until{};                    ///< Paced calls keep it until then.
    bool finished = false;
  };

  void throw_if_failed() const;
  [[noreturn]] void fail_all(ErrorKind kind, int culprit, std::string message);
  void record(Failure failure);
  [[nodiscard]] std::string report() const;
  void wake_all();

  std::shared_ptr<Meeting>& meeting_of(const Issued& issued);
  std::shared_ptr<Meeting> arrive(const Issued& issued);
  void complete(Meeting& meeting);
  void wait_for_all(Lock& lock, Meeting& meeting, const Issued& issued, std::chrono::milliseconds timeout);
  void do_share(Lock& lock, Meeting& meeting);
  void wait_until_done(Lock& lock, Meeting& meeting);
  void leave(Meeting& meeting);
  void wait_for_link(Lock& lock, TimePoint until);

  std::shared_ptr<OpenWindow> wait_for_window(Lock& lock, const Group& group, const Put& put,
                                              const Call& call, std::chrono::milliseconds timeout);
  TimePoint reserve_links(const Group& group, const Put& put);
  [[nodiscard]] std::string who_owes(const Group& group, const OpenWindow& open, int waiting) const;
  /// A rank that has finished without having put all that it owes; -1: none.
  [[nodiscard]] int gone_debtor(const Group& group, const OpenWindow& open) const;
  [[nodiscard]] TimePoint latest_busy() const;

  [[nodiscard]] int world_rank(const Issued& issued) const;
  [[nodiscard]] bool can_still_come(const Meeting& meeting, std::size_t slot) const;
  [[nodiscard]] TimePoint latest_busy(const Meeting& meeting) const;
  void check_nobody_is_gone(const Meeting& meeting, const Issued& issued);
  [[nodiscard]] std::string who_is_missing(const Meeting& meeting, std::vector<int>& named) const;
  [[nodiscard]] std::string why_missing(const Meeting& meeting, std::size_t slot,
                                        std::vector<int>& named) const;
  [[nodiscard]] std::string state_of(int rank, std::vector<int>& named) const;

  const LinkModel link_model_;
  std::shared_ptr<Group> whole_;
  std::mutex mutex_;
  std::condition_variable link_wait_;  // Ranks that wait for their paced link.
  std::optional<Failure> failure_;
  std::vector<RankState> ranks_;
  std::vector<Link> links_;
  std::map<MeetingKey, std::shared_ptr<Meeting>> meetings_;
  std::map<WindowKey, std::shared_ptr<OpenWindow>> windows_;
  std::condition_variable windows_changed_;  // Opened, something has come, or a copy has ended.
  std::int64_t next_group_id_ = 1;
};

}  // namespace flashoverlap::comm

#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/call.h"
#include "comm/mpi/control.h"
#include "comm/mpi/pending.h"
#include "comm/mpi/staging.h"
#include "flashoverlap/error.h"

namespace flashoverlap::comm::mpi {

/// What one process knows of a world: who failed, who has finished, and what its own calls wait for. A world
/// and all its subgroups share one fate.
///
/// The service thread (see Service) answers for this rank while its other threads compute, and hears of
/// others' failures; nothing else reads the control channel.
class MpiWorld {
 public:
  using Clock = std::chrono::steady_clock;

  /// `control`: a communicator of this world's own, over all its ranks.
  explicit MpiWorld(MPI_Comm control);
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] StagingPool& staging() { return staging_; }

  [[nodiscard]] bool failed() const { return has_failed_.load(std::memory_order_acquire); }
  void throw_if_failed() const;
  /// Tells all ranks and throws; an earlier failure wins.
  [[noreturn]] void fail_all(ErrorKind kind, const std::string& message);
  void abort(const std::string& reason) noexcept;
  /// This rank makes no more calls.
  void finish() noexcept;

  // What this rank's calls do.
  void note_issued(std::shared_ptr<const Call> call);
  void enter(const std::shared_ptr<Pending>& pending);
  void leave(const std::shared_ptr<Pending>& pending);
  /// A call of another rank has come.
  void note_seen(int rank, const Call& call);

  /// True when `rank` finished so long ago that a call which it made before would have come.
  [[nodiscard]] bool finished_before(int rank) const;

  /// Asks the ranks where they are and waits a moment for their answers. For each: what to say of it.
  [[nodiscard]] std::vector<std::string> whereabouts(const std::vector<int>& ranks);
  /// Asks the ranks that are at work. True when all answer.
  [[nodiscard]] bool all_answer();

  // By the service thread.
  /// Reads what has come; true when anything had.
  bool serve();
  /// True while answers matter: it should be called often.
  [[nodiscard]] bool is_urgent() const;
  /// All ranks have finished and nothing is under way: it can be freed.
  [[nodiscard]] bool is_over();

  // At the end of the process.
  /// Ranks that have not finished.
  [[nodiscard]] std::vector<int> others_at_work() const;
  [[nodiscard]] bool has_calls_in_flight() const;
  void free_control();

  /// JSON for the watchdog report.
  [[nodiscard]] std::string report() const;

 private:
  struct Failure {
    ErrorKind kind;
    std::string message;
  };
  struct Other {
    std::string process;    // "process 17 on host a"; empty until its hello came.
    std::string last_seen;  // Description of its last call that came here.
    std::optional<Clock::time_point> finished;
  };

  /// Returns the number of the question, once all have answered, or some had time enough, or the world
  /// failed.
  std::int64_t ask(const std::vector<int>& ranks);
  bool record(ErrorKind kind, const std::string& message);
  void tell_all(const ControlMessage& message) noexcept;
  void take(const ControlChannel::Received& received);
  [[nodiscard]] std::string own_state() const;

  MPI_Comm control_comm_;
  ControlChannel control_;
  int rank_ = 0;
  int size_ = 1;
  StagingPool staging_;
  std::atomic<bool> has_failed_{false};

  mutable std::mutex mutex_;  // Guards all below.
  std::condition_variable answered_;
  std::optional<Failure> failure_;
  Clock::time_point urgent_until_{};
  std::vector<Other> others_;
  bool has_finished_ = false;
  std::shared_ptr<const Call> last_issued_;
  std::shared_ptr<const Call> last_reached_;
  std::int64_t num_issued_ = 0;
  std::int64_t num_completed_ = 0;
  std::vector<std::shared_ptr<Pending>> pending_;
  std::int64_t next_question_ = 1;
  std::map<std::pair<std::int64_t, int>, std::string> answers_;  // By question and rank.
};

}  // namespace flashoverlap::comm::mpi

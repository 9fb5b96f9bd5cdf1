// Where the ranks of one host meet, be they threads or processes: memory that they share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/communicator.h"

namespace flashoverlap::comm {

/// Throws Error(kUnsupported) that names two ranks whose marks differ: marks[r] says on which host rank r is.
void require_one_host(const std::vector<std::string>& marks);

/// Ranks of one host that come together again and again, within microseconds when they come at the same time.
/// Each has a slot of shared memory, which it writes before it comes and the others read after all have come;
/// whoever has read must come once more before its owner writes again.
///
/// The memory has no name once all ranks have it, so nothing is left behind, whatever ends them. A rank whose
/// process ends without closing its meeting is noticed while others wait.
class SharedMeeting {
 public:
  /// Collective over `control`, which only brings the ranks together. Error(kUnsupported) on every rank when
  /// they are on several hosts, or one cannot share memory with the others.
  SharedMeeting(Communicator& control, std::int64_t slot_bytes, std::chrono::milliseconds timeout);
  ~SharedMeeting();
  SharedMeeting(const SharedMeeting&) = delete;
  SharedMeeting& operator=(const SharedMeeting&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  /// `slot_bytes` of rank r, at a multiple of 64 bytes; zero at first.
  [[nodiscard]] std::byte* slot(int r) const;

  /// Comes to the next meeting, and waits for all. `what` says in an error message what this rank came for.
  /// Throws, and makes every rank throw: Error(kTimeout) naming the ranks that did not come,
  /// Error(kCommunication) naming one that is gone.
  void meet(const std::function<std::string()>& what);

  /// Every rank's next look at the meeting throws this; the first reason stays. Never throws.
  void fail(ErrorKind kind, std::string_view reason) noexcept;
  /// Also looks, now and then, whether all ranks are still there.
  void throw_if_failed();

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_ = timeout.count(); }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_ms_); }

 private:
  struct Board;
  struct State;

  void open(const std::string& name, bool is_new);
  [[nodiscard]] std::size_t bytes() const;
  [[nodiscard]] Board& board() const;
  [[nodiscard]] State& state(int r) const;
  void close() noexcept;
  [[nodiscard]] bool is_gone(int r) const;
  [[nodiscard]] std::string missing() const;
  [[noreturn]] void give_up(ErrorKind kind, const std::string& reason);

  const int rank_;
  const int size_;
  const std::int64_t slot_bytes_;
  std::atomic<std::int64_t> timeout_ms_;
  std::uint64_t meetings_ = 0;  // that this rank has come to
  std::atomic<std::int64_t> next_look_ns_{0};
  int file_ = -1;
  void* memory_ = nullptr;
};

}  // namespace flashoverlap::comm

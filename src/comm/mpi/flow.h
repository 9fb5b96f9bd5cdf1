#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/mpi/requests.h"

namespace flashoverlap::comm::mpi {

/// Messages are cut into segments of so many bytes, of which so many are under way per peer and direction. So
/// counts have no limit, completed segments show that a long transfer moves, sums overlap with the messages
/// behind them, and staging memory does not grow with the call.
inline constexpr std::int64_t kSegmentBytes = 256 * 1024;
inline constexpr std::int64_t kWindow = 4;

/// One peer and one direction of a call's data.
class Flow {
 public:
  struct Spec {
    bool is_receive = false;
    int peer = 0;
    int tag = 0;
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    /// `data` holds kWindow segments, used in turn.
    bool is_ring = false;
  };

  /// Nothing moves before `allow`. `on_progress` is called after each completed segment.
  Flow(Requests& requests, const Spec& spec, std::function<void()> on_progress = {});
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;

  /// The first `segments` segments may move (no effect when more may already).
  void allow(std::int64_t segments);
  void allow_all() { allow(num_segments_); }

  [[nodiscard]] const Spec& spec() const { return spec_; }
  [[nodiscard]] std::int64_t num_segments() const { return num_segments_; }
  /// Segments [0, completed) are complete.
  [[nodiscard]] std::int64_t completed() const { return completed_; }
  [[nodiscard]] bool done() const { return completed_ == num_segments_; }
  /// A segment of another size than expected has come: the ranks' calls do not match.
  [[nodiscard]] bool has_wrong_size() const { return has_wrong_size_; }

 private:
  void pump();
  void complete(std::int64_t segment, int bytes);
  [[nodiscard]] std::int64_t bytes_of(std::int64_t segment) const;

  Requests& requests_;
  Spec spec_;
  std::function<void()> on_progress_;
  std::int64_t num_segments_;
  std::int64_t allowed_ = 0;
  std::int64_t next_ = 0;
  std::int64_t completed_ = 0;
  std::vector<bool> is_complete_;  // Of segment completed_ + index: sends may complete out of order.
  bool has_wrong_size_ = false;
};

/// Number of segments of `bytes` bytes, and where segment `index` begins and how long it is.
[[nodiscard]] constexpr std::int64_t segments_of(std::int64_t bytes) {
  return (bytes + kSegmentBytes - 1) / kSegmentBytes;
}

}  // namespace flashoverlap::comm::mpi

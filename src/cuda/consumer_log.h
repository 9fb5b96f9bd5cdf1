// What consumers tell of the calls of one executor.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "device.h"
#include "put_consumer.h"

namespace flashoverlap::cuda {

/// Of the last kKept calls with puts, in memory of the host that the device writes. Not thread-safe.
class ConsumerLog {
 public:
  explicit ConsumerLog(int device);
  ~ConsumerLog();
  ConsumerLog(const ConsumerLog&) = delete;
  ConsumerLog& operator=(const ConsumerLog&) = delete;

  /// Whether calls from now on are timed: it takes a small kernel behind the GEMM.
  void turn(bool on) { is_on_ = on; }
  [[nodiscard]] bool is_on() const { return is_on_; }

  /// Where the call that is being enqueued writes; null while nothing is timed.
  [[nodiscard]] ConsumerTimes* now() const { return is_on_ ? times_ + calls_ % kKept : nullptr; }
  /// Behind everything of that call in `stream`.
  void end_call(cudaStream_t stream);

  /// Calls so far, timed or not.
  [[nodiscard]] std::int64_t calls() const { return calls_; }
  /// Of call `number`, counted from 0. Nothing while it is not over, when it was not timed, or too long ago.
  [[nodiscard]] std::optional<ConsumerTimes> of_call(std::int64_t number) const;

 private:
  static constexpr std::int64_t kKept = 8;

  int device_;
  bool is_on_ = false;
  std::int64_t calls_ = 0;
  ConsumerTimes* times_ = nullptr;
  std::array<Event, kKept> ended_;
  std::array<bool, kKept> is_timed_{};
};

}  // namespace flashoverlap::cuda

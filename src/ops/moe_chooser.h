#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashoverlap/operators.h"

namespace flashoverlap::ops {

/// Finds out by measurement whether calls should be overlapped. Deterministic, so that ranks that are told
/// the same decide the same.
class MoeChooser {
 public:
  struct Decision {
    Method method = Method::kOverlap;
    std::string reason;  ///< One line.
  };

  /// Before each call: its most rows of one rank, and how long the call before took (the slowest rank; 0: not
  /// known, then it counts for nothing).
  Decision next(std::int64_t rows, double last_call_us);
  /// Whether the time of the call that follows the last `next` will count.
  [[nodiscard]] bool wants_time() const { return last_counts_; }

 private:
  void start_trial(std::int64_t rows);
  void take_in(double call_us);

  std::vector<double> serial_us_;
  std::vector<double> overlap_us_;
  std::int64_t rows_ = -1;  ///< Of the trial in force.
  std::int64_t calls_ = 0;  ///< Since the trial began.
  Method last_ = Method::kOverlap;
  bool last_counts_ = false;
  std::string why_trial_;
};

/// More than a quarter more or less: what was found for `before` need not hold.
bool is_other_load(std::int64_t rows, std::int64_t before);

}  // namespace flashoverlap::ops

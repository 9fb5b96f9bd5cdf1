#include "ops/moe_chooser.h"

#include <fmt/format.h>

#include <cmath>

#include "core/median.h"

namespace flashoverlap::ops {
namespace {

// Of each method; the first call of each only makes plans and buffers.
constexpr std::int64_t kTrials = 3;
constexpr std::int64_t kTrialCalls = 2 * (kTrials + 1);
constexpr std::int64_t kCallsBetweenTrials = 1000;

}  // namespace

bool is_other_load(std::int64_t rows, std::int64_t before) {
  if (before < 0) return true;
  return std::abs(rows - before) * 4 > before;
}

void MoeChooser::start_trial(std::int64_t rows) {
  why_trial_ = rows_ < 0                    ? "first calls"
               : is_other_load(rows, rows_) ? fmt::format("{} rows instead of {}", rows, rows_)
                                            : fmt::format("{} calls since the last trial", calls_);
  serial_us_.clear();
  overlap_us_.clear();
  rows_ = rows;
  calls_ = 0;
  last_counts_ = false;
}

void MoeChooser::take_in(double call_us) {
  if (!last_counts_ || !(call_us > 0)) return;
  (last_ == Method::kSerial ? serial_us_ : overlap_us_).push_back(call_us);
  last_counts_ = false;
}

MoeChooser::Decision MoeChooser::next(std::int64_t rows, double last_call_us) {
  take_in(last_call_us);
  if (is_other_load(rows, rows_) || calls_ >= kCallsBetweenTrials) start_trial(rows);
  ++calls_;
  const bool tries = calls_ <= kTrialCalls || serial_us_.empty() || overlap_us_.empty();
  if (tries) {
    last_ = calls_ % 2 == 1 ? Method::kOverlap : Method::kSerial;
    last_counts_ = calls_ > 2;
    return {last_, fmt::format("trial, call {} of {}: {}", calls_, kTrialCalls, why_trial_)};
  }
  const double serial = core::median(serial_us_);
  const double overlap = core::median(overlap_us_);
  last_ = overlap < serial ? Method::kOverlap : Method::kSerial;
  return {last_, fmt::format("{}: {:.0f} us, {} {:.0f} us, medians of {} calls",
                             last_ == Method::kOverlap ? "overlapped" : "serial",
                             last_ == Method::kOverlap ? overlap : serial,
                             last_ == Method::kOverlap ? "serial" : "overlapped",
                             last_ == Method::kOverlap ? serial : overlap, kTrials)};
}

}  // namespace flashoverlap::ops

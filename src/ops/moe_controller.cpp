#include "flashoverlap/moe_controller.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/fail.h"
#include "ops/moe_checks.h"

namespace flashoverlap {
namespace {

// The fewest consumers cannot become fewer, but may put larger segments when they mostly wait.
constexpr double kMostlyIdle = 0.8;

// A step after which calls are this much longer than the shortest is taken back …
constexpr double kWorse = 1.05;
// … and may be tried again once calls take this much longer or shorter than before it.
constexpr double kOtherLoad = 0.2;

void check_share(const char* name, double value) {
  if (value >= 0 && value <= 1) return;
  core::fail(ErrorKind::kBadArgument, "controller: {} is {}; a share in [0, 1] is expected", name, value);
}

void check_time(const char* name, double value) {
  if (std::isfinite(value) && value >= 0) return;
  core::fail(ErrorKind::kBadArgument, "controller: {} is {}; a finite number >= 0 is expected", name, value);
}

std::string text_of(const MoeSetting& s) {
  return fmt::format("{} consumers, {} compute units, {} bands a segment", s.consumers, s.compute_units,
                     s.segment_bands);
}

}  // namespace

MoeController::MoeController(const MoeControllerOptions& options, const MoeSetting& initial)
    : options_(options), setting_(initial) {
  ops::at_least("controller: min_consumers", options.min_consumers, 1);
  ops::at_least("controller: max_consumers", options.max_consumers, options.min_consumers);
  ops::at_least("controller: consumer_step", options.consumer_step, 1);
  ops::at_least("controller: min_segment_bands", options.min_segment_bands, 1);
  ops::at_least("controller: max_segment_bands", options.max_segment_bands, options.min_segment_bands);
  ops::at_least("controller: total_units", options.total_units, 0);
  ops::at_least("controller: patience", options.patience, 1);
  check_share("high_backlog", options.high_backlog);
  check_share("high_idle", options.high_idle);
  if (options.total_units > 0 && options.max_consumers >= options.total_units) {
    core::fail(ErrorKind::kBadArgument,
               "controller: max_consumers is {} of {} units; at least one unit must be left to compute",
               options.max_consumers, options.total_units);
  }
  setting_.consumers = std::clamp(setting_.consumers, options.min_consumers, options.max_consumers);
  setting_.segment_bands =
      std::clamp(setting_.segment_bands, options.min_segment_bands, options.max_segment_bands);
  set_units();
}

void MoeController::set_units() {
  if (options_.total_units > 0) setting_.compute_units = options_.total_units - setting_.consumers;
}

MoeController::Wish MoeController::wish_of(const MoeObservation& observation) const {
  const double limit = options_.high_backlog * observation.producer_us;
  if (observation.backlog_us > limit) return Wish::kMore;
  if (observation.backlog_us >= limit / 2) return Wish::kStay;
  if (setting_.consumers <= options_.min_consumers) {
    return observation.consumer_idle > kMostlyIdle ? Wish::kLess : Wish::kStay;
  }
  // The same puts on fewer consumers.
  const double busy = (1 - observation.consumer_idle) * static_cast<double>(setting_.consumers) /
                      static_cast<double>(fewer_consumers());
  return 1 - busy > options_.high_idle ? Wish::kLess : Wish::kStay;
}

std::int64_t MoeController::fewer_consumers() const {
  return std::max(options_.min_consumers, setting_.consumers - options_.consumer_step);
}

bool MoeController::step(Wish wish, MoeSetting& next) const {
  next = setting_;
  if (wish == Wish::kMore) {
    if (next.consumers < options_.max_consumers) {
      next.consumers = std::min(options_.max_consumers, next.consumers + options_.consumer_step);
    } else {
      next.segment_bands = std::max(options_.min_segment_bands, next.segment_bands / 2);
    }
  } else {
    if (next.consumers > options_.min_consumers) {
      next.consumers = fewer_consumers();
    } else {
      next.segment_bands = std::min(options_.max_segment_bands, next.segment_bands * 2);
    }
  }
  return !(next == setting_);
}

/// Ends the trial of the step before, when there is one.
std::string MoeController::judge(double mean_us) {
  on_trial_ = false;
  if (mean_us <= shortest_us_ * kWorse) {
    return fmt::format("kept {}: {:.0f} us a call, {:.0f} us before", text_of(setting_), mean_us, before_us_);
  }
  barred_ = trial_;
  barred_us_ = before_us_;
  setting_ = before_;
  in_a_row_ = 0;
  recent_us_.clear();
  return fmt::format("back to {}: {:.0f} us a call instead of {:.0f} us", text_of(setting_), mean_us,
                     shortest_us_);
}

std::string MoeController::observe(const MoeObservation& observation) {
  check_time("producer_us", observation.producer_us);
  check_time("backlog_us", observation.backlog_us);
  check_share("consumer_idle", observation.consumer_idle);
  if (frozen_) return "frozen at " + text_of(setting_);
  const double call_us = observation.producer_us + observation.backlog_us;
  const Wish wish = wish_of(observation);
  in_a_row_ = wish == last_wish_ ? in_a_row_ + 1 : 1;
  last_wish_ = wish;
  recent_us_.push_back(call_us);
  if (std::ssize(recent_us_) > options_.patience) recent_us_.erase(recent_us_.begin());
  if (wish == Wish::kStay || std::abs(call_us - barred_us_) > kOtherLoad * barred_us_) barred_ = Wish::kStay;
  const double mean_us =
      std::accumulate(recent_us_.begin(), recent_us_.end(), 0.0) / static_cast<double>(recent_us_.size());
  if (on_trial_) {
    if (std::ssize(recent_us_) < options_.patience) return "trying " + text_of(setting_);
    return judge(mean_us);
  }
  const char* const why = wish == Wish::kMore ? "backlog" : "idle consumers";
  if (wish == Wish::kStay) return "in range with " + text_of(setting_);
  if (in_a_row_ < options_.patience || std::ssize(recent_us_) < options_.patience) {
    return fmt::format("{} once more would change {}", why, text_of(setting_));
  }
  MoeSetting next;
  if (wish == barred_ || !step(wish, next)) {
    return fmt::format("{}, but {} {}", why, text_of(setting_),
                       wish == barred_ ? "was better" : "is at its bounds");
  }
  before_ = setting_;
  before_us_ = mean_us;
  const bool is_other_load = std::abs(mean_us - shortest_us_) > kOtherLoad * shortest_us_;
  shortest_us_ = is_other_load ? mean_us : std::min(shortest_us_, mean_us);
  trial_ = wish;
  on_trial_ = true;
  setting_ = next;
  set_units();
  in_a_row_ = 0;
  recent_us_.clear();
  return fmt::format("{} of {:.0f} us in {:.0f} us, {:.0f} % idle: to {}", why, observation.backlog_us,
                     observation.producer_us, 100 * observation.consumer_idle, text_of(setting_));
}

}  // namespace flashoverlap

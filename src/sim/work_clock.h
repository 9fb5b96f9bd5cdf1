#pragma once

namespace flashoverlap::sim {

/// Maps work time (rank_compute.h) to real time: straight lines whose slope is the rate at which the units
/// get on. While the rate never changes the mapping is the identity, exactly.
class WorkClock {
 public:
  [[nodiscard]] double work_at(double real_us) const {
    return identity_ ? real_us : work_us_ + (real_us - real_us_) * rate_;
  }
  [[nodiscard]] double real_at(double work_us) const {
    return identity_ ? work_us : real_us_ + (work_us - work_us_) / rate_;
  }
  [[nodiscard]] double rate() const { return rate_; }

  void set_rate(double rate, double now_us) {
    if (rate == rate_) return;
    work_us_ = work_at(now_us);
    real_us_ = now_us;
    rate_ = rate;
    identity_ = false;
  }

 private:
  double real_us_ = 0;
  double work_us_ = 0;
  double rate_ = 1;
  bool identity_ = true;
};

}  // namespace flashoverlap::sim

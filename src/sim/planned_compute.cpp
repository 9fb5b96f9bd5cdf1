#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>

#include "sim/rank_compute.h"

namespace flashoverlap::sim {
namespace {

class PlannedCompute final : public RankCompute {
 public:
  explicit PlannedCompute(std::shared_ptr<const GroupEnds> ends) : ends_(std::move(ends)) {}

  [[nodiscard]] double next_work_us() const override {
    return done() ? std::numeric_limits<double>::infinity() : end_of(ends_->order[announced_]);
  }
  std::vector<std::int64_t> step(double) override {
    std::vector<std::int64_t> completed;
    const double now = next_work_us();
    while (!done() && end_of(ends_->order[announced_]) == now)
      completed.push_back(ends_->order[announced_++]);
    return completed;
  }
  void slice_arrived(std::int64_t, double, double) override {}
  [[nodiscard]] bool done() const override { return announced_ == ends_->order.size(); }
  [[nodiscard]] double busy_us() const override { return ends_->busy_us; }
  [[nodiscard]] std::int64_t held_up_by(std::int64_t) const override { return -1; }
  [[nodiscard]] std::string stuck() const override { return {}; }

 private:
  [[nodiscard]] double end_of(std::int64_t group) const {
    return ends_->work_us[static_cast<std::size_t>(group)];
  }

  std::shared_ptr<const GroupEnds> ends_;
  std::size_t announced_ = 0;
};

}  // namespace

GroupEnds group_ends(const OverlapPlan& plan, const ComputeModel& model, double slow_factor, Jitter jitter) {
  using Unit = std::pair<double, std::int64_t>;  // free from, number
  std::priority_queue<Unit, std::vector<Unit>, std::greater<>> units;
  for (std::int64_t unit = 0; unit < plan.resources.compute_units; ++unit)
    units.emplace(model.launch_us(), unit);
  GroupEnds ends;
  for (const WaveGroup& group : plan.groups) {
    // An empty group is complete at once.
    double last = group.num_tiles == 0 ? 0 : model.launch_us();
    for (std::int64_t p = group.first_position; p < group.first_position + group.num_tiles; ++p) {
      const auto [free_from, unit] = units.top();
      units.pop();
      const double tile_us =
          model.tile_us(plan.schedule[static_cast<std::size_t>(p)]) * slow_factor * jitter.factor();
      ends.busy_us += tile_us;
      units.emplace(free_from + tile_us, unit);
      last = std::max(last, free_from + tile_us);
    }
    ends.work_us.push_back(last);
  }
  ends.order.resize(ends.work_us.size());
  std::iota(ends.order.begin(), ends.order.end(), std::int64_t{0});
  std::stable_sort(ends.order.begin(), ends.order.end(), [&](std::int64_t a, std::int64_t b) {
    return ends.work_us[static_cast<std::size_t>(a)] < ends.work_us[static_cast<std::size_t>(b)];
  });
  return ends;
}

std::unique_ptr<RankCompute> make_planned_compute(std::shared_ptr<const GroupEnds> ends) {
  return std::make_unique<PlannedCompute>(std::move(ends));
}

}  // namespace flashoverlap::sim

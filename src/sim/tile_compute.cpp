#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <utility>

#include "sim/rank_compute.h"

namespace flashoverlap::sim {
namespace {

/// What one unit is doing.
struct Unit {
  std::int64_t tile = -1;  ///< -1: idle.
  std::int64_t position = -1;
  std::size_t pass = 0;
  double tile_us = 0;
  double done_fraction = 0;        ///< Of the tile's time, computed so far.
  double end_fraction = 1;         ///< Where this pass ends.
  std::size_t next_gate = 0;       ///< Among the tile's gates, start gates first.
  std::int64_t waits_for = -1;     ///< Slice.
  bool waits_for_pass = false;     ///< Another unit is still at the tile's last pass.
  std::int64_t last_held_by = -1;  ///< Slice.
  double span_begin_us = 0;        ///< Real time.
};

class TileCompute final : public RankCompute {
 public:
  TileCompute(const OverlapPlan& plan, const ComputeModel& model, double slow_factor, Jitter jitter,
              std::int32_t rank, Timeline* timeline)
      : plan_(plan),
        model_(model),
        slow_factor_(slow_factor),
        jitter_(jitter),
        rank_(rank),
        timeline_(timeline) {
    for (const std::int64_t begin : plan.passes()) pass_begins_.push_back(fraction_at(begin));
    passes_done_.resize(static_cast<std::size_t>(plan.grid.num_tiles()), 0);
    gates_passed_.resize(static_cast<std::size_t>(plan.grid.num_tiles()), 0);
    gates_.resize(static_cast<std::size_t>(plan.grid.num_tiles()));
    for (const Gate& gate : plan.gates) gates_[static_cast<std::size_t>(gate.tile)].push_back(gate);
    for (std::vector<Gate>& gates : gates_) {
      std::stable_sort(gates.begin(), gates.end(), [](const Gate& a, const Gate& b) {
        if (a.point != b.point) return a.point == GatePoint::kStart;
        return a.point == GatePoint::kStart && a.k_begin < b.k_begin;
      });
    }
    arrived_.resize(plan.slices.size(), false);
    units_.resize(static_cast<std::size_t>(plan.resources.compute_units));
    for (std::size_t unit = 0; unit < units_.size(); ++unit) ready_.emplace(model.launch_us(), unit);
    left_in_group_.reserve(plan.groups.size());
    for (const WaveGroup& group : plan.groups) left_in_group_.push_back(group.num_tiles);
    held_up_by_.resize(plan.groups.size(), -1);
    if (plan.schedule.empty()) ready_ = {};
  }

  [[nodiscard]] double next_work_us() const override {
    if (!started_ && !plan_.groups.empty()) return 0;
    return ready_.empty() ? std::numeric_limits<double>::infinity() : ready_.top().first;
  }

  std::vector<std::int64_t> step(double now_us) override {
    std::vector<std::int64_t> completed;
    if (!started_) {  // empty groups are complete at once
      started_ = true;
      for (std::size_t group = 0; group < left_in_group_.size(); ++group) {
        if (left_in_group_[group] == 0) completed.push_back(static_cast<std::int64_t>(group));
      }
    } else {
      const auto [work_us, unit] = ready_.top();
      ready_.pop();
      const std::int64_t group = advance(unit, work_us, now_us);
      if (group >= 0) completed.push_back(group);
    }
    announced_ += completed.size();
    return completed;
  }

  void slice_arrived(std::int64_t slice, double work_us, double now_us) override {
    arrived_[static_cast<std::size_t>(slice)] = true;
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      if (units_[unit].waits_for != slice) continue;
      record(units_[unit], unit, now_us, SpanKind::kWait);
      units_[unit].waits_for = -1;
      units_[unit].last_held_by = slice;
      ready_.emplace(work_us, unit);
    }
  }

  [[nodiscard]] bool done() const override { return announced_ == plan_.groups.size(); }
  [[nodiscard]] double busy_us() const override { return busy_us_; }
  [[nodiscard]] std::int64_t held_up_by(std::int64_t group) const override {
    return held_up_by_[static_cast<std::size_t>(group)];
  }
  [[nodiscard]] std::string stuck() const override {
    for (const Unit& unit : units_) {
      if (unit.waits_for < 0) continue;
      return fmt::format("tile {} (wave {}) waits for slice {} from rank {}", unit.tile,
                         plan_.wave_of(unit.position), unit.waits_for,
                         plan_.slices[static_cast<std::size_t>(unit.waits_for)].source);
    }
    return {};
  }

 private:
  /// The unit's current piece of work is over: on to the next piece, gate or tile. Returns the group that
  /// this completes, or -1.
  std::int64_t advance(std::size_t index, double work_us, double now_us) {
    Unit& unit = units_[index];
    if (unit.tile < 0 && !take_next_tile(unit, now_us)) return -1;
    if (passes_done_[static_cast<std::size_t>(unit.tile)] < unit.pass) {
      unit.waits_for_pass = true;
      ++units_between_passes_;
      return -1;
    }
    const std::vector<Gate>& gates = gates_[static_cast<std::size_t>(unit.tile)];
    unit.next_gate = std::max(unit.next_gate, gates_passed_[static_cast<std::size_t>(unit.tile)]);
    while (unit.next_gate < gates.size()) {
      const Gate& gate = gates[unit.next_gate];
      const double fraction = fraction_before(gate);
      if (!in_last_pass(unit) && (gate.point == GatePoint::kFinish || fraction >= unit.end_fraction)) break;
      if (fraction > unit.done_fraction) {
        compute(unit, index, fraction, work_us);
        return -1;
      }
      if (!arrived_[static_cast<std::size_t>(gate.slice)]) {
        record(unit, index, now_us, SpanKind::kCompute);
        unit.waits_for = gate.slice;
        return -1;
      }
      ++unit.next_gate;
    }
    if (unit.done_fraction < unit.end_fraction) {
      compute(unit, index, unit.end_fraction, work_us);
      return -1;
    }
    ready_.emplace(work_us, index);
    return finish_pass(unit, index, work_us, now_us);
  }

  [[nodiscard]] bool in_last_pass(const Unit& unit) const { return unit.pass + 1 == pass_begins_.size(); }

  /// How much of its tile can be computed before the gate.
  [[nodiscard]] double fraction_before(const Gate& gate) const {
    return gate.point == GatePoint::kFinish ? 1 : fraction_at(gate.k_begin);
  }

  /// How much of a tile is computed when the main loop comes to `k`.
  [[nodiscard]] double fraction_at(std::int64_t k) const {
    if (plan_.grid.k() == 0) return 0;
    return static_cast<double>(k) / static_cast<double>(plan_.grid.k());
  }

  bool take_next_tile(Unit& unit, double now_us) {
    const std::size_t tiles = plan_.schedule.size();
    if (next_position_ == tiles * pass_begins_.size()) return false;
    unit.pass = next_position_ / tiles;
    unit.position = static_cast<std::int64_t>(next_position_ % tiles);
    unit.tile = plan_.schedule[next_position_++ % tiles];
    unit.tile_us = model_.tile_us(unit.tile) * slow_factor_ * jitter_.factor();
    unit.done_fraction = pass_begins_[unit.pass];
    unit.end_fraction = in_last_pass(unit) ? 1 : pass_begins_[unit.pass + 1];
    unit.next_gate = 0;
    unit.span_begin_us = now_us;
    return true;
  }

  void compute(Unit& unit, std::size_t index, double to_fraction, double work_us) {
    const double piece = (to_fraction - unit.done_fraction) * unit.tile_us;
    unit.done_fraction = to_fraction;
    busy_us_ += piece;
    ready_.emplace(work_us + piece, index);
  }

  std::int64_t finish_pass(Unit& unit, std::size_t index, double work_us, double now_us) {
    record(unit, index, now_us, SpanKind::kCompute);
    if (!in_last_pass(unit)) {
      ++passes_done_[static_cast<std::size_t>(unit.tile)];
      gates_passed_[static_cast<std::size_t>(unit.tile)] = unit.next_gate;
      wake_next_pass(unit.tile, work_us, now_us);
      unit.tile = -1;
      return -1;
    }
    const auto group = static_cast<std::size_t>(plan_.group_of(unit.position));
    unit.tile = -1;
    if (--left_in_group_[group] > 0) return -1;
    held_up_by_[group] = unit.last_held_by;
    return static_cast<std::int64_t>(group);
  }

  void wake_next_pass(std::int64_t tile, double work_us, double now_us) {
    if (units_between_passes_ == 0) return;  // nearly always
    for (std::size_t other = 0; other < units_.size(); ++other) {
      Unit& unit = units_[other];
      if (!unit.waits_for_pass || unit.tile != tile) continue;
      unit.waits_for_pass = false;
      --units_between_passes_;
      unit.span_begin_us = now_us;
      ready_.emplace(work_us, other);
    }
  }

  void record(Unit& unit, std::size_t index, double now_us, SpanKind kind) {
    if (timeline_ != nullptr && now_us > unit.span_begin_us) {
      timeline_->spans.push_back({rank_, fmt::format("compute {}", index),
                                  kind == SpanKind::kWait
                                      ? fmt::format("tile {} waits for slice {}", unit.tile, unit.waits_for)
                                      : fmt::format("tile {}", unit.tile),
                                  kind, unit.span_begin_us, now_us});
    }
    unit.span_begin_us = now_us;
  }

  const OverlapPlan& plan_;
  const ComputeModel& model_;
  double slow_factor_;
  Jitter jitter_;
  std::int32_t rank_;
  Timeline* timeline_;
  std::vector<double> pass_begins_;        ///< As fractions of a tile.
  std::vector<std::size_t> passes_done_;   ///< By tile.
  std::vector<std::size_t> gates_passed_;  ///< By tile: in earlier passes, so that none is looked at twice.
  std::int64_t units_between_passes_ = 0;  ///< That wait for another unit's pass.
  std::vector<std::vector<Gate>> gates_;   ///< By tile.
  std::vector<bool> arrived_;              ///< By slice.
  std::vector<Unit> units_;
  using Ready = std::pair<double, std::size_t>;  // work time, unit
  std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready_;
  std::size_t next_position_ = 0;
  std::vector<std::int64_t> left_in_group_;
  std::size_t announced_ = 0;
  std::vector<std::int64_t> held_up_by_;
  double busy_us_ = 0;
  bool started_ = false;
};

}  // namespace

std::unique_ptr<RankCompute> make_tile_compute(const OverlapPlan& plan, const ComputeModel& model,
                                               double slow_factor, Jitter jitter, std::int32_t rank,
                                               Timeline* timeline) {
  return std::make_unique<TileCompute>(plan, model, slow_factor, jitter, rank, timeline);
}

}  // namespace flashoverlap::sim

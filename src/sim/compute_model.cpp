#include "sim/compute_model.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace flashoverlap::sim {

ComputeModel::ComputeModel(const OverlapPlan& plan, const MachineProfile& machine)
    : plan_(plan),
      kernel_(machine.gemm.kernel(plan.dtype, plan.grid.tile_m(), plan.grid.tile_n())),
      launch_us_(machine.gemm.launch_us) {
  const auto measured = machine.gemm.measured_us({.m = plan.grid.rows(),
                                                  .n = plan.grid.cols(),
                                                  .k = plan.grid.k(),
                                                  .dtype = plan.dtype,
                                                  .tile_m = plan.grid.tile_m(),
                                                  .tile_n = plan.grid.tile_n(),
                                                  .units = plan.resources.compute_units});
  if (!measured || *measured <= launch_us_ || plan.groups.empty()) return;
  const std::vector<double> ends = group_ends_us();
  const double modelled = *std::max_element(ends.begin(), ends.end());
  if (modelled > launch_us_) factor_ = (*measured - launch_us_) / (modelled - launch_us_);
}

double ComputeModel::tile_us(std::int64_t tile) const {
  const Tile& shape = plan_.grid.tile(tile);
  return factor_ * kernel_.tile_us(shape.rows, shape.cols, plan_.grid.k());
}

std::vector<double> ComputeModel::group_ends_us() const {
  using Unit = std::pair<double, std::int64_t>;  // free from, number
  std::priority_queue<Unit, std::vector<Unit>, std::greater<>> units;
  for (std::int64_t unit = 0; unit < plan_.resources.compute_units; ++unit) units.emplace(launch_us_, unit);
  std::vector<double> ends;
  double last = launch_us_;
  for (const WaveGroup& group : plan_.groups) {
    for (std::int64_t p = group.first_position; p < group.first_position + group.num_tiles; ++p) {
      const auto [free_from, unit] = units.top();
      units.pop();
      const double end = free_from + tile_us(plan_.schedule[static_cast<std::size_t>(p)]);
      units.emplace(end, unit);
      last = std::max(last, end);
    }
    ends.push_back(last);
  }
  return ends;
}

double restore_us(const OverlapPlan& plan, const MachineProfile& machine) {
  constexpr double kMib = 1024.0 * 1024.0;
  std::int64_t rows = 0;  // others are in their place
  for (const RestoreBand& band : plan.restore.bands) rows += band.rows;
  const double bytes = static_cast<double>(rows) * static_cast<double>(plan.output_cols) *
                       static_cast<double>(size_of(plan.dtype));
  return machine.restore_us_per_mib * bytes / kMib;
}

}  // namespace flashoverlap::sim

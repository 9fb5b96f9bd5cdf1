#include "flashoverlap/simulator.h"

#include <cmath>
#include <set>

#include "core/fail.h"
#include "flashoverlap/error.h"
#include "sim/simulation.h"

namespace flashoverlap {
namespace {

void check_options(const SimulationOptions& options, std::size_t num_ranks) {
  if (!(options.jitter >= 0 && options.jitter <= 1)) {
    core::fail(ErrorKind::kBadArgument, "jitter is {}, must be in [0, 1]", options.jitter);
  }
  if (options.timeline_ranks < 0) {
    core::fail(ErrorKind::kBadArgument, "timeline_ranks is {}, must be >= 0", options.timeline_ranks);
  }
  for (const auto& [rank, factor] : options.slow_ranks) {
    if (rank < 0 || rank >= static_cast<std::int64_t>(num_ranks)) {
      core::fail(ErrorKind::kBadArgument, "slow rank {} is not one of the {} ranks", rank, num_ranks);
    }
    if (!(factor > 0 && std::isfinite(factor))) {
      core::fail(ErrorKind::kBadArgument, "slow rank {} has factor {}, must be finite and > 0", rank, factor);
    }
  }
}

void check_plans(std::span<const OverlapPlan* const> plans) {
  if (plans.empty())
    core::fail(ErrorKind::kBadArgument, "no plans to simulate, at least one rank's is needed");
  std::set<const OverlapPlan*> seen;
  for (std::size_t rank = 0; rank < plans.size(); ++rank) {
    if (!seen.insert(plans[rank]).second) continue;
    if (plans[rank]->world_size != static_cast<std::int64_t>(plans.size())) {
      core::fail(ErrorKind::kBadArgument, "rank {}'s plan is for {} ranks, but {} plans were given", rank,
                 plans[rank]->world_size, plans.size());
    }
    if (const Verdict verdict = verify(*plans[rank]); !verdict) {
      core::fail(ErrorKind::kBadArgument, "rank {}'s plan does not hold: {}", rank, verdict.reason);
    }
  }
}

}  // namespace

SimulationResult simulate(std::span<const OverlapPlan* const> plans, const MachineProfile& machine,
                          const SimulationOptions& options) {
  check_options(options, plans.size());
  check_plans(plans);
  return sim::Simulation(plans, machine, options).run();
}

SimulationResult simulate(std::span<const OverlapPlan> plans, const MachineProfile& machine,
                          const SimulationOptions& options) {
  std::vector<const OverlapPlan*> pointers;
  for (const OverlapPlan& plan : plans) pointers.push_back(&plan);
  return simulate(std::span<const OverlapPlan* const>(pointers), machine, options);
}

SimulationResult simulate_symmetric(const OverlapPlan& plan, const MachineProfile& machine,
                                    const SimulationOptions& options) {
  const std::vector<const OverlapPlan*> pointers(static_cast<std::size_t>(plan.world_size), &plan);
  return simulate(std::span<const OverlapPlan* const>(pointers), machine, options);
}

}  // namespace flashoverlap

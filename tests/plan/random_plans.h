#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "flashoverlap/plan_builders.h"

namespace flashoverlap::test {

/// One call of a builder, for all ranks.
struct PlanCase {
  enum class Operation { kAllReduce, kContiguous, kBlockCyclic, kAllToAll };
  Operation operation = Operation::kAllReduce;
  PlanOptions options;
  Routing routing;

  [[nodiscard]] OverlapPlan plan(std::int32_t rank) const {
    PlanOptions own = options;
    own.rank = rank;
    if (operation == Operation::kAllReduce) return plan_all_reduce(own);
    if (operation == Operation::kAllToAll) return plan_all_to_all(own, routing);
    return plan_reduce_scatter(own, ownership());
  }

  [[nodiscard]] std::vector<OverlapPlan> plans() const {
    std::vector<OverlapPlan> all;
    for (std::int32_t rank = 0; rank < options.world_size; ++rank) all.push_back(plan(rank));
    return all;
  }

  [[nodiscard]] RowOwnership ownership() const {
    return operation == Operation::kContiguous ? RowOwnership::kContiguous : RowOwnership::kBlockCyclic;
  }

  /// Waves of the rank with the most.
  [[nodiscard]] std::int64_t waves() const {
    if (operation == Operation::kContiguous) return num_waves_reduce_scatter(options, ownership());
    PlanOptions longest = options;
    for (const auto& destinations : routing.destinations)
      longest.m = std::max(longest.m, std::ssize(destinations));
    return num_waves(longest);
  }

  /// Enough to repeat the case.
  [[nodiscard]] std::string text() const {
    std::string routes;
    for (const auto& d : routing.destinations) routes += fmt::format(" [{}]", fmt::join(d, " "));
    return fmt::format(
        "operation {} world {} m {} n {} k {} tile {}x{} swizzle {} units {} partition {} routing{}",
        static_cast<int>(operation), options.world_size, options.m, options.n, options.k, options.tile_m,
        options.tile_n, options.swizzle, options.resources.compute_units, fmt::join(options.partition, ","),
        routes);
  }
};

class RandomPlans {
 public:
  explicit RandomPlans(std::mt19937_64& rng) : rng_(rng) {}

  std::int64_t pick(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng_);
  }

  PlanCase next() {
    PlanCase c;
    c.operation = static_cast<PlanCase::Operation>(pick(0, 3));
    PlanOptions& o = c.options;
    o.world_size = static_cast<std::int32_t>(pick(1, 9));
    o.dtype = static_cast<DType>(pick(0, 2));
    o.n = pick(0, 9) == 0 ? 0 : pick(1, 40);
    o.k = pick(0, 8);
    o.tile_m = pick(1, 16);
    o.tile_n = pick(1, 16);
    o.swizzle = pick(1, 4);
    o.resources = {pick(1, 6), pick(0, 2)};
    if (c.operation == PlanCase::Operation::kAllToAll) {
      c.routing = routing(o.world_size);
    } else {
      o.m = pick(0, 9) == 0 ? 0 : pick(1, 60);
    }
    if (pick(0, 3) > 0) o.partition = partition(c.waves());
    return c;
  }

  /// Any composition of `waves`.
  std::vector<std::int64_t> partition(std::int64_t waves) {
    std::vector<std::int64_t> parts;
    while (waves > 0) {
      parts.push_back(pick(1, pick(0, 4) == 0 ? waves : std::min<std::int64_t>(waves, 4)));
      waves -= parts.back();
    }
    return parts;
  }

  /// Uneven, some ranks empty; uniform, skewed to one rank, or in runs.
  Routing routing(std::int32_t world_size) {
    Routing routing;
    const std::int64_t style = pick(0, 2);
    const std::int64_t favourite = pick(0, world_size - 1);
    for (std::int32_t rank = 0; rank < world_size; ++rank) {
      std::vector<std::int32_t> destinations;
      const std::int64_t rows = pick(0, 3) == 0 ? 0 : pick(1, 50);
      for (std::int64_t row = 0; row < rows; ++row) {
        std::int64_t d = pick(0, world_size - 1);
        if (style == 1 && pick(0, 9) > 0) d = favourite;
        if (style == 2 && row > 0 && pick(0, 4) > 0) d = destinations.back();
        destinations.push_back(static_cast<std::int32_t>(d));
      }
      routing.destinations.push_back(std::move(destinations));
    }
    return routing;
  }

 private:
  std::mt19937_64& rng_;
};

}  // namespace flashoverlap::test

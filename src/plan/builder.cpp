#include "plan/builder.h"

#include <utility>

#include "core/fail.h"
#include "plan/arithmetic.h"

namespace flashoverlap::plan {
namespace {

using core::fail;

}  // namespace

void at_least(std::string_view name, std::int64_t value, std::int64_t minimum) {
  if (value < minimum) fail(ErrorKind::kBadArgument, "{} must be at least {}, got {}", name, minimum, value);
}

void check_rank(std::int32_t rank, std::int32_t world_size) {
  at_least("world_size", world_size, 1);
  if (rank < 0 || rank >= world_size) {
    fail(ErrorKind::kBadArgument, "rank {} is not in [0, {})", rank, world_size);
  }
}

void check_matrix(std::string_view a_name, std::int64_t a, std::string_view b_name, std::int64_t b,
                  DType dtype) {
  const auto elements = product(a, b);
  if (!elements || !product(*elements, size_of(dtype))) {
    fail(ErrorKind::kBadArgument, "{} x {} = {} x {} elements of {} have 2^63 bytes or more", a_name, b_name,
         a, b, name_of(dtype));
  }
}

void check_options(const PlanOptions& options) {
  check_rank(options.rank, options.world_size);
  at_least("m", options.m, 0);
  at_least("n", options.n, 0);
  at_least("k", options.k, 0);
  at_least("tile_m", options.tile_m, 1);
  at_least("tile_n", options.tile_n, 1);
  at_least("swizzle", options.swizzle, 1);
  at_least("compute_units", options.resources.compute_units, 1);
  at_least("communication_units", options.resources.communication_units, 0);
  check_matrix("m", options.m, "n", options.n, options.dtype);
  check_matrix("m", options.m, "k", options.k, options.dtype);
  check_matrix("n", options.n, "k", options.k, options.dtype);
}

OverlapPlan start_plan(std::string_view operation, const PlanOptions& options, TileGrid grid) {
  OverlapPlan plan;
  plan.operation = operation;
  plan.rank = options.rank;
  plan.world_size = options.world_size;
  plan.dtype = options.dtype;
  plan.placement.first_segment.assign(index(grid.num_tiles() + 1), 0);
  plan.grid = std::move(grid);
  plan.resources = options.resources;
  plan.output_rows = options.m;
  plan.output_cols = options.n;
  return plan;
}

std::span<const std::int64_t> tiles_of(const OverlapPlan& plan, const WaveGroup& group) {
  return std::span(plan.schedule).subspan(index(group.first_position), index(group.num_tiles));
}

PlacementBuilder::PlacementBuilder(std::int64_t num_tiles) {
  placement_.first_segment.reserve(index(num_tiles + 1));
  placement_.first_segment.push_back(0);
}

void PlacementBuilder::add_tile(std::span<const PlacementSegment> segments) {
  placement_.segments.insert(placement_.segments.end(), segments.begin(), segments.end());
  placement_.first_segment.push_back(static_cast<std::int64_t>(placement_.segments.size()));
}

Placement PlacementBuilder::take() {
  return std::move(placement_);
}

}  // namespace flashoverlap::plan

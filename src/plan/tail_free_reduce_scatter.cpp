#include <algorithm>
#include <utility>

#include "flashoverlap/plan_builders.h"
#include "plan/arithmetic.h"
#include "plan/builder.h"
#include "plan/slices.h"

namespace flashoverlap {
namespace {

using plan::index;

constexpr std::string_view kOperation = "gemm-reduce-scatter";

// More parts cost more latencies than they can hide.
constexpr std::int64_t kMostParts = 8;
constexpr std::int64_t kLeastParts = 2;

class Builder {
 public:
  Builder(const PlanOptions& options, const plan::Slices& slices, std::int64_t parts,
          const plan::SendChannels& channels, OverlapPlan& plan)
      : options_(options), slices_(slices), parts_(parts), channels_(channels), plan_(plan) {}

  void build() {
    plan_.messages_per_pair = most_messages();
    segments_.resize(index(plan_.grid.num_tiles()));
    for (std::int32_t step = 1; step < options_.world_size; ++step) send_slice(step);
    for (const std::vector<std::int64_t>& tiles : slices_.tile_parts(options_.rank, 1)) add_group(tiles);
    if (plan_.groups.empty()) plan_.groups.push_back({0, 0});
    // By source, so that the gates of each tile are in the order of ranks.
    for (std::int32_t source = 0; source < options_.world_size; ++source) {
      if (source != options_.rank) receive_slice(source);
    }
    std::ranges::stable_sort(plan_.gates, {}, &Gate::tile);
    plan::PlacementBuilder placement(plan_.grid.num_tiles());
    for (const std::vector<PlacementSegment>& of_tile : segments_) placement.add_tile(of_tile);
    plan_.placement = placement.take();
  }

 private:
  /// Parts in which `sender`'s slice of step `step` travels. The owner adds it tile by tile, while it
  /// computes its own slice at the end: part i of P must be there when the owner comes to its own part i. A
  /// slice takes p to compute and at most p to send, and the sender goes on for q after it: part i arrives at
  /// the latest at -q - p + (i + 2) p / P before the end, and is needed at -p + i p / P, so that P >= 2 p /
  /// q. At least two, all along: a slice sent as a whole would still be on its way when a part of the next is
  /// complete.
  [[nodiscard]] std::int64_t parts_in_step(std::int32_t sender, std::int32_t step) const {
    if (parts_ > 0) return parts_;
    const std::int32_t world = options_.world_size;
    const std::int32_t target = plan::rank_after(sender, step, world);
    const std::int64_t slice = slices_.size(target);
    // Those of the ranks after the target up to the sender, around the end where the sender comes before it.
    const std::int64_t around = sender < target ? slices_.begin(world) : 0;
    const std::int64_t after = around + slices_.begin(sender + 1) - slices_.begin(target + 1);
    if (after <= slice / (kMostParts / 2)) return kMostParts;
    return std::max(kLeastParts, plan::ceil_div(slice, plan::ceil_div(after, 2)));
  }

  [[nodiscard]] std::int64_t most_messages() const {
    std::int64_t most = 0;
    for (std::int32_t sender = 0; sender < options_.world_size; ++sender) {
      for (std::int32_t step = 1; step < options_.world_size; ++step) {
        const std::int32_t target = plan::rank_after(sender, step, options_.world_size);
        most = std::max(most, slices_.num_tile_parts(target, parts_in_step(sender, step)));
      }
    }
    return most;
  }

  void add_group(const std::vector<std::int64_t>& tiles) {
    plan_.groups.push_back({std::ssize(plan_.schedule), std::ssize(tiles)});
    plan_.schedule.insert(plan_.schedule.end(), tiles.begin(), tiles.end());
  }

  void send_slice(std::int32_t step) {
    const std::int32_t target = plan::rank_after(options_.rank, step, options_.world_size);
    for (const std::vector<std::int64_t>& tiles :
         slices_.tile_parts(target, parts_in_step(options_.rank, step))) {
      const Trigger complete{TriggerKind::kGroup, std::ssize(plan_.groups)};
      add_group(tiles);
      const std::int64_t begin = plan_.packed_size;
      for (const std::int64_t t : tiles) {
        const Tile& tile = plan_.grid.tile(t);
        segments_[index(t)].push_back({0, tile.rows, plan_.packed_size});
        plan_.packed_size += tile.size();
      }
      plan_.transfers.push_back(plan::send_to(target, channels_.of(options_.rank, step), complete,
                                              {BufferKind::kPacked, begin, plan_.packed_size - begin}));
    }
  }

  /// The own slice's tiles as `source` has computed them, laid out as it has packed them.
  void receive_slice(std::int32_t source) {
    const std::int32_t step = (options_.rank - source + options_.world_size) % options_.world_size;
    for (const std::vector<std::int64_t>& tiles :
         slices_.tile_parts(options_.rank, parts_in_step(source, step))) {
      const std::int64_t begin = plan_.received_size;
      const auto slice = std::ssize(plan_.slices);
      for (const std::int64_t tile : tiles) {
        plan_.gates.push_back({.tile = tile,
                               .slice = slice,
                               .point = GatePoint::kFinish,
                               .k_begin = 0,
                               .offset = plan_.received_size});
        plan_.received_size += plan_.grid.tile(tile).size();
      }
      const Region region{BufferKind::kReceived, begin, plan_.received_size - begin};
      plan_.slices.push_back({source, region});
      plan_.transfers.push_back(plan::receive_from(source, channels_.of(source, step), region, slice));
    }
  }

  const PlanOptions& options_;
  const plan::Slices& slices_;
  std::int64_t parts_;
  plan::SendChannels channels_;
  OverlapPlan& plan_;
  std::vector<std::vector<PlacementSegment>> segments_;  // by tile
};

}  // namespace

OverlapPlan plan_tail_free_reduce_scatter(const PlanOptions& options, const SliceOptions& slices) {
  plan::check_options(options);
  plan::check_no_partition(options);
  plan::check_parts(slices.parts);
  const std::vector<std::int64_t> begins = slice_begins(slices, options.m, options.world_size);
  const plan::Slices cut(options, begins, SliceAxis::kRows);
  OverlapPlan plan = plan::start_plan(kOperation, options, cut.grid());
  const plan::SendChannels channels(slices.send_channels, plan::kChannelsOfComputed, options.world_size);
  plan.agreement = plan::hash_slices("tail-free gemm-reduce-scatter", options, begins, SliceAxis::kRows,
                                     slices.parts, channels.count());
  plan.output_rows = cut.size(options.rank);
  plan.output_row_shift = -cut.begin(options.rank);
  Builder(options, cut, slices.parts, channels, plan).build();
  return plan;
}

}  // namespace flashoverlap

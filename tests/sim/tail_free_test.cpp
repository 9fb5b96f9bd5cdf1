/// Tail-free means (arXiv 2604.24013): where the communication of a slice takes no longer than its
/// computation, none of it shows, at either end, on any rank.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "flashoverlap/plan_builders.h"
#include "flashoverlap/simulator.h"
#include "support/seed.h"

namespace flashoverlap::test {
namespace {

constexpr std::int64_t kTile = 64;
constexpr double kLatencyUs = 3;
constexpr double kSignalUs = 1;
/// Exposed communication that no latency explains.
constexpr double kMuchUs = 5 * (kLatencyUs + kSignalUs);

MachineProfile machine_with(double gbps, double latency_us = kLatencyUs) {
  MachineProfile machine;
  machine.name = "plain";
  machine.units = 64;
  machine.gemm.launch_us = 5;
  machine.gemm.kernels = {{DType::kFloat32, kTile, kTile, 1.5, 8.192, RaggedTiles::kProportional, "test"}};
  machine.signal_us = kSignalUs;
  machine.levels = {
      {.name = "link", .ranks = 0, .latency_us = latency_us, .bandwidth_gbps = gbps, .source = "test"}};
  return machine;
}

enum class Kind { kGatherRows, kGatherColumns, kReduceScatter, kHeads, kFromHeads };

struct Case {
  Kind kind = Kind::kGatherRows;
  PlanOptions options;
  std::vector<std::int64_t> sizes;  ///< Of the slices, in elements along the axis.
  std::int64_t parts = 0;
  std::int64_t send_channels = 0;

  [[nodiscard]] std::string text() const {
    return fmt::format("kind {} world {} m {} n {} k {} units {} slices {}", static_cast<int>(kind),
                       options.world_size, options.m, options.n, options.k, options.resources.compute_units,
                       fmt::join(sizes, ","));
  }
  [[nodiscard]] std::vector<OverlapPlan> plans() const {
    std::vector<OverlapPlan> plans;
    for (std::int32_t rank = 0; rank < options.world_size; ++rank) {
      PlanOptions own = options;
      own.rank = rank;
      const SliceOptions slices{.sizes = sizes, .parts = parts, .send_channels = send_channels};
      switch (kind) {
        case Kind::kGatherRows:
          plans.push_back(plan_all_gather_gemm(own, slices));
          break;
        case Kind::kGatherColumns:
          plans.push_back(plan_all_gather_gemm(own, slices, SliceAxis::kColumns));
          break;
        case Kind::kReduceScatter:
          plans.push_back(plan_tail_free_reduce_scatter(own, slices));
          break;
        case Kind::kHeads:
          plans.push_back(plan_gemm_all_to_all(own, HeadSlices{SliceOptions{}, slices}));
          break;
        case Kind::kFromHeads:
          plans.push_back(plan_all_to_all_gemm(own, HeadSlices{SliceOptions{}, slices}));
          break;
      }
    }
    return plans;
  }
  /// Time to compute, and bytes to send, of a slice of `size` on a rank.
  [[nodiscard]] double compute_us(std::int64_t size) const {
    if (kind == Kind::kFromHeads) {  // its share of the main loop, of all tiles
      const double tiles = static_cast<double>(across() / kTile) * static_cast<double>(options.n / kTile);
      return static_cast<double>(size) / static_cast<double>(options.k) * tiles * tile_us() /
             static_cast<double>(options.resources.compute_units);
    }
    const double tiles = static_cast<double>(size / kTile) * static_cast<double>(across() / kTile);
    return tiles * tile_us() / static_cast<double>(options.resources.compute_units);
  }
  /// Exposed: a transfer's latency and, where a slice's tiles do not fill the units evenly, up to one tile,
  /// as a slice then ends or begins that much earlier on one unit than on another.
  [[nodiscard]] double allowed_us() const {
    const std::int64_t units = options.resources.compute_units;
    const bool is_even =
        std::ranges::all_of(sizes, [&](std::int64_t size) { return size / kTile % units == 0; });
    return kLatencyUs + kSignalUs + (is_even || kind == Kind::kFromHeads ? 0 : tile_us());
  }
  [[nodiscard]] double tile_us() const {
    return 1.5 + 2.0 * kTile * kTile * static_cast<double>(options.k) / 8192;
  }
  [[nodiscard]] double bytes(std::int64_t size) const {
    const bool gathers = kind == Kind::kGatherRows || kind == Kind::kGatherColumns;
    return 4.0 * static_cast<double>(size) * static_cast<double>(gathers ? options.k : across());
  }
  /// The product's size along the other axis, of one rank.
  [[nodiscard]] std::int64_t across() const {
    if (kind == Kind::kHeads || kind == Kind::kFromHeads) return options.m / options.world_size;
    return kind == Kind::kGatherColumns ? options.m : options.n;
  }
  /// The bandwidth on which the longest transfer, with latency and signal, takes `share` of the shortest
  /// computation. Two transfers, as a slice may be cut in two.
  [[nodiscard]] double gbps(double share) const {
    const auto [least, most] = std::ranges::minmax(sizes);
    const double budget_us = share * compute_us(least) - 2 * (kLatencyUs + kSignalUs);
    EXPECT_GT(budget_us, 0);
    return bytes(most) / budget_us / 1e3;
  }
};

class TailFree : public SeededTest {
 protected:
  Case random_case(Kind kind, std::int32_t world, bool equal) {
    Case c;
    c.kind = kind;
    PlanOptions& o = c.options;
    o.world_size = world;
    o.k = pick(2, 8) * 16;
    // So that latencies are small beside the computation also where all transfers share a link.
    if (!equal) o.k *= world;
    o.tile_m = o.tile_n = kTile;
    o.swizzle = pick(1, 3);
    o.resources = {pick(1, 4), 0};
    // At least as many tiles as units, and so many that signals are small beside them.
    const std::int64_t least = 2 * o.resources.compute_units;
    std::int64_t total = 0;
    const std::int64_t step = pick(0, 1) == 0 ? 1 : o.resources.compute_units;
    const auto pick_tiles = [&] { return least + pick(0, least / step) * step; };
    const std::int64_t same = pick_tiles();
    for (std::int32_t rank = 0; rank < world; ++rank) {
      c.sizes.push_back(kTile * (equal ? same : pick_tiles()));
      total += c.sizes.back();
    }
    const std::int64_t across = kTile * pick(2, 5);
    o.m = kind == Kind::kGatherColumns ? across : total;
    o.n = kind == Kind::kGatherColumns ? total : across;
    if (kind == Kind::kHeads) {
      o.m = across * world;
      o.n = total;
    }
    if (kind == Kind::kFromHeads) {
      o.m = across * world;
      o.n = kTile * o.resources.compute_units * pick(2, 4) * (equal ? 1 : 1 + world / 16);
      o.k = total;
    }
    return c;
  }
};

constexpr Kind kKinds[] = {Kind::kGatherRows, Kind::kGatherColumns, Kind::kReduceScatter, Kind::kHeads,
                           Kind::kFromHeads};
constexpr std::int32_t kWorlds[] = {2, 3, 4, 5, 7, 8, 13, 16, 32, 64};

TEST_F(TailFree, NothingShowsWhereCommunicationIsNoLongerThanComputation) {
  for (const Kind kind : kKinds) {
    for (const std::int32_t world : kWorlds) {
      for (const bool equal : {true, false}) {
        const Case c = random_case(kind, world, equal);
        SCOPED_TRACE(c.text());
        const std::vector<OverlapPlan> plans = c.plans();
        // Slices of different sizes get out of step, so that all transfers to a rank may share its link: each
        // takes as many times as long there.
        const double sharing = equal ? 1 : world - 1;
        const SimulationResult result = simulate(plans, machine_with(c.gbps(0.9 / sharing)));
        for (std::size_t rank = 0; rank < result.ranks.size(); ++rank) {
          const RankSimulation& r = result.ranks[rank];
          EXPECT_GT(r.communicating_us, 0);
          EXPECT_LE(r.exposed_communication_us, c.allowed_us())
              << "rank " << rank << " of " << world << ", communicates for " << r.communicating_us;
        }
        if (HasFailure()) return;
      }
    }
  }
}

/// One rank's part of a trace.
struct RankTrace {
  std::map<std::string, Span> first_of_unit;
  double last_tile_end_us = 0;
  double last_transfer_begin_us = 0;
  double last_transfer_end_us = 0;
};

RankTrace trace_of(const SimulationResult& result, std::int32_t rank) {
  RankTrace trace;
  for (const Span& span : result.timeline.spans) {
    if (span.rank != rank) continue;
    if (span.track.starts_with("compute")) {
      const auto [first, is_new] = trace.first_of_unit.try_emplace(span.track, span);
      if (!is_new && span.begin_us < first->second.begin_us) first->second = span;
      if (span.kind == SpanKind::kCompute)
        trace.last_tile_end_us = std::max(trace.last_tile_end_us, span.end_us);
    } else if (span.kind == SpanKind::kCommunication) {
      trace.last_transfer_begin_us = std::max(trace.last_transfer_begin_us, span.begin_us);
      trace.last_transfer_end_us = std::max(trace.last_transfer_end_us, span.end_us);
    }
  }
  return trace;
}

// The same as a trace shows it: the first tile of every unit is computed from the start of the call, without
// a wait, and when the last tile is done, so is everything that is sent and received.
TEST_F(TailFree, ATraceBeginsWithTilesThatWaitForNothingAndEndsWithOnesThatSendNothing) {
  for (const Kind kind : kKinds) {
    for (const std::int32_t world : {2, 3, 4, 8}) {
      const Case c = random_case(kind, world, true);
      SCOPED_TRACE(c.text());
      const MachineProfile machine = machine_with(c.gbps(0.9));
      const SimulationResult result =
          simulate(c.plans(), machine, {.slow_ranks = {}, .timeline_ranks = world});
      for (std::int32_t rank = 0; rank < world; ++rank) {
        const RankTrace trace = trace_of(result, rank);
        EXPECT_EQ(std::ssize(trace.first_of_unit), c.options.resources.compute_units);
        for (const auto& [unit, span] : trace.first_of_unit) {
          EXPECT_EQ(span.kind, SpanKind::kCompute) << "rank " << rank << ", " << unit << ": " << span.name;
          EXPECT_LE(span.begin_us, machine.gemm.launch_us) << "rank " << rank << ", " << unit;
        }
        EXPECT_GT(trace.last_transfer_end_us, 0) << "rank " << rank;
        EXPECT_LT(trace.last_transfer_begin_us, trace.last_tile_end_us) << "rank " << rank;
        EXPECT_LE(trace.last_transfer_end_us, trace.last_tile_end_us + c.allowed_us()) << "rank " << rank;
      }
      if (HasFailure()) return;
    }
  }
}

double most_exposed_us(const SimulationResult& result) {
  double most = 0;
  for (const RankSimulation& rank : result.ranks) most = std::max(most, rank.exposed_communication_us);
  return most;
}

// Many ranks have small slices, of which the latency is much. It passes while another slice is on the wire
// where a rank sends two at a time: then what shows does not grow with the number of ranks.
TEST_F(TailFree, LatenciesOfManySlicesDoNotAddUp) {
  constexpr double kWire = 0.45;     // of a slice's computation
  constexpr double kTogether = 1.2;  // with the latencies of all its messages
  for (const Kind kind : kKinds) {
    for (const std::int32_t world : {4, 8, 16, 32, 64}) {
      Case c = random_case(kind, world, true);
      SCOPED_TRACE(c.text());
      const double slice_us = c.compute_us(c.sizes[0]);
      const double messages = kind == Kind::kReduceScatter ? 2 : 1;
      const double latency_us = (kTogether - kWire) * slice_us / messages;
      const MachineProfile machine = machine_with(c.bytes(c.sizes[0]) / (kWire * slice_us) / 1e3, latency_us);
      c.send_channels = 2;
      const double two_us = most_exposed_us(simulate(c.plans(), machine));
      // The first slice that arrives, or the last that is sent, takes so much longer than a slice's
      // computation; a group's signal comes on top, and so does a tile where slices do not fill the units.
      EXPECT_LE(two_us, (kTogether - 1) * slice_us + c.allowed_us()) << latency_us;
      c.send_channels = 1;
      const double one_us = most_exposed_us(simulate(c.plans(), machine));
      EXPECT_GE(one_us, (kTogether - 1) * slice_us * (world - 2) - c.allowed_us()) << latency_us;
      if (HasFailure()) return;
    }
  }
}

// What the property above is about: it can fail.
TEST_F(TailFree, ASlowLinkShowsAndSoDoesACollectivePerSlice) {
  for (const Kind kind : {Kind::kGatherRows, Kind::kReduceScatter}) {
    const Case c = random_case(kind, 4, true);
    SCOPED_TRACE(c.text());
    const SimulationResult slow = simulate(c.plans(), machine_with(c.gbps(0.9) / 3));
    for (const RankSimulation& r : slow.ranks)
      EXPECT_GT(r.exposed_communication_us, c.compute_us(c.sizes[0]));

    std::vector<OverlapPlan> sliced;
    for (std::int32_t rank = 0; rank < 4; ++rank) {
      PlanOptions own = c.options;
      own.rank = rank;
      sliced.push_back(kind == Kind::kGatherRows ? plan_sliced_all_gather_gemm(own, {.sizes = c.sizes}, 4)
                                                 : plan_reduce_scatter(own, SliceOptions{.sizes = c.sizes}));
    }
    const SimulationResult baseline = simulate(sliced, machine_with(c.gbps(0.9)));
    for (const RankSimulation& r : baseline.ranks) EXPECT_GT(r.exposed_communication_us, kMuchUs);
  }
}

// The last slice that is sent is needed by the first tiles of the slice that its owner computes meanwhile.
TEST_F(TailFree, TheLastSliceOfAReduceScatterHasToBeCut) {
  Case c = random_case(Kind::kReduceScatter, 4, true);
  SCOPED_TRACE(c.text());
  c.parts = 1;
  const SimulationResult whole = simulate(c.plans(), machine_with(c.gbps(0.9)));
  for (const RankSimulation& r : whole.ranks) EXPECT_GT(r.exposed_communication_us, kMuchUs);
}

// Communication that takes longer than computation shows as far as it is longer, and finer slices leave less
// of the rest.
TEST_F(TailFree, FinerSlicesPayOnASlowLink) {
  for (const Kind kind : {Kind::kGatherRows, Kind::kReduceScatter}) {
    Case c = random_case(kind, 4, true);
    SCOPED_TRACE(c.text());
    const MachineProfile machine = machine_with(c.gbps(0.9) / 4);
    c.parts = 1;
    const double whole_us = simulate(c.plans(), machine).total_us;
    c.parts = 4;
    EXPECT_LT(simulate(c.plans(), machine).total_us, whole_us - kLatencyUs);
  }
}

}  // namespace
}  // namespace flashoverlap::test

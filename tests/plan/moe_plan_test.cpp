#include "flashoverlap/moe_plan.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap {
namespace {

using MoePlanTest = test::SeededTest;

struct Case {
  MoePadding padding;
  MoeOrder order;
  MoeTransport transport;
};

constexpr Case kCases[] = {
    {MoePadding::kPaper, MoeOrder::kExpertMajor, MoeTransport::kPut},
    {MoePadding::kPaper, MoeOrder::kOwnerMajor, MoeTransport::kPut},
    {MoePadding::kRagged, MoeOrder::kExpertMajor, MoeTransport::kPut},
    {MoePadding::kRagged, MoeOrder::kOwnerMajor, MoeTransport::kPut},
    {MoePadding::kShared, MoeOrder::kExpertMajor, MoeTransport::kPut},
    {MoePadding::kRagged, MoeOrder::kOwnerMajor, MoeTransport::kCollective},
};

std::string text_of(const MoePlanOptions& o, const MoeCounts& c, std::int64_t n, std::int64_t k) {
  return fmt::format("W={} E={} tile={}x{} n={} k={} x={} groups={} {} {} {} counts {}", o.world_size,
                     o.num_experts, o.tile_m, o.tile_n, n, k, o.segment_bands, o.collective_groups,
                     name_of(o.padding), name_of(o.order), name_of(o.transport), fmt::join(c.rows, " "));
}

/// Two ranks with two experts each, tiles four rows high, and rows that differ everywhere.
MoeCounts small_counts() {
  return {2, 4, {3, 0, 5, 1, 2, 4, 0, 6}};
}

MoePlanOptions small_options(std::int32_t rank, MoePadding padding, MoeOrder order) {
  MoePlanOptions options;
  options.rank = rank;
  options.world_size = 2;
  options.num_experts = 4;
  options.tile_m = 4;
  options.tile_n = 8;
  options.padding = padding;
  options.order = order;
  return options;
}

/// Own rows are written in place where the layout allows it, and then travel nowhere; else as all others.
void expect_own_rows_stay(const OverlapPlan& plan, const MoeLayout& layout, bool allows) {
  std::int64_t in_place = 0;
  for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
    if (plan.placement.of_tile(t).empty()) in_place += plan.grid.tile(t).size();
  }
  std::int64_t to_itself = 0;
  for (const Transfer& transfer : plan.transfers) {
    if (transfer.kind == TransferKind::kPut && transfer.peer == plan.rank) to_itself += transfer.source.count;
    if (transfer.kind == TransferKind::kAllToAll)
      to_itself += transfer.send_counts[static_cast<std::size_t>(plan.rank)];
  }
  const std::int64_t own = layout.own_rows * plan.output_cols;
  if (allows || to_itself == 0) {
    EXPECT_EQ(in_place, own) << "rank " << plan.rank;
    EXPECT_EQ(to_itself, 0) << "rank " << plan.rank;
    EXPECT_EQ(plan.received_size, plan.output_rows * plan.output_cols - own) << "rank " << plan.rank;
  } else {
    EXPECT_EQ(in_place, 0) << "rank " << plan.rank;
    EXPECT_EQ(to_itself, own) << "rank " << plan.rank;
  }
}

/// What one segment puts to one rank is as few messages as can be: none begins there where another one ends.
void expect_no_puts_that_touch(const OverlapPlan& plan) {
  std::map<std::pair<std::int64_t, std::int32_t>, std::set<std::int64_t>> ends;  // by segment and peer
  for (const Transfer& put : plan.transfers) {
    ends[{put.trigger.index, put.peer}].insert(put.destination.offset + put.destination.count);
  }
  for (const Transfer& put : plan.transfers) {
    if (put.destination.count == 0) continue;
    const bool touches = ends[{put.trigger.index, put.peer}].contains(put.destination.offset);
    EXPECT_FALSE(touches) << "rank " << plan.rank << ", segment " << put.trigger.index << " to rank "
                          << put.peer << " at " << put.destination.offset;
  }
}

TEST_F(MoePlanTest, PlansOfAllRanksHold) {
  for (int round = 0; round < 150; ++round) {
    MoePlanOptions options;
    options.world_size = static_cast<std::int32_t>(pick(1, 6));
    options.num_experts = pick(1, 9);
    options.tile_m = pick(1, 6);
    options.tile_n = pick(1, 9);
    options.segment_bands = pick(1, 4);
    options.collective_groups = pick(1, 5);
    options.resources = {pick(1, 4), pick(0, 3)};
    MoeCounts counts{options.world_size, options.num_experts, {}};
    const std::int64_t most = pick(0, 1) == 0 ? 3 : 14;
    for (std::int64_t i = 0; i < counts.world_size * counts.num_experts; ++i) {
      counts.rows.push_back(pick(0, 3) == 0 ? 0 : pick(0, most));
    }
    const std::int64_t n = pick(0, 20);
    const std::int64_t k = pick(0, 5);
    for (const Case& c : kCases) {
      options.padding = c.padding;
      options.order = c.order;
      options.transport = c.transport;
      SCOPED_TRACE(text_of(options, counts, n, k));
      const auto dispatch = plan_moe_dispatch_all(options, counts, n, k);
      const auto combine = plan_moe_combine_all(options, counts, n, k);
      EXPECT_EQ(verify(std::span<const OverlapPlan>(dispatch)).reason, "");
      EXPECT_EQ(verify(std::span<const OverlapPlan>(combine)).reason, "");
      const auto rank = static_cast<std::int32_t>(pick(0, options.world_size - 1));
      options.rank = rank;
      if (options.world_size > 1) {
        expect_own_rows_stay(combine[static_cast<std::size_t>(rank)], moe_layout(options, counts),
                             c.padding == MoePadding::kRagged && c.order == MoeOrder::kOwnerMajor);
      }
      if (c.transport == MoeTransport::kPut) {
        expect_no_puts_that_touch(combine[static_cast<std::size_t>(rank)]);
      }
      EXPECT_EQ(plan_moe_dispatch(options, counts, n, k), dispatch[static_cast<std::size_t>(rank)]);
      EXPECT_EQ(plan_moe_combine(options, counts, n, k), combine[static_cast<std::size_t>(rank)]);
      EXPECT_EQ(plan_from_json(to_json(dispatch[static_cast<std::size_t>(rank)])),
                dispatch[static_cast<std::size_t>(rank)]);
      if (HasFailure()) return;
    }
  }
}

// With collectives, too, a tile waits for the owners of its rows only, in the order in which they send.
TEST_F(MoePlanTest, ACollectiveDispatchBringsEachOwnersRowsByThemselves) {
  for (int round = 0; round < 50; ++round) {
    MoePlanOptions options;
    options.world_size = static_cast<std::int32_t>(pick(2, 6));
    options.num_experts = pick(1, 9);
    options.tile_m = pick(1, 6);
    options.tile_n = 8;
    options.transport = MoeTransport::kCollective;
    options.collective_groups = pick(2, 5);
    MoeCounts counts{options.world_size, options.num_experts, {}};
    for (std::int64_t i = 0; i < counts.world_size * counts.num_experts; ++i)
      counts.rows.push_back(pick(0, 9));
    constexpr std::int64_t kDepth = 4;
    for (const OverlapPlan& plan : plan_moe_dispatch_all(options, counts, 16, kDepth)) {
      SCOPED_TRACE(text_of(options, counts, 16, kDepth));
      options.rank = plan.rank;
      const MoeLayout layout = moe_layout(options, counts);
      ASSERT_EQ(std::ssize(plan.slices), plan.world_size - 1);
      std::set<std::pair<std::int64_t, std::int32_t>> waits, expected;  // tile, owner
      for (const Gate& gate : plan.gates)
        waits.emplace(gate.tile, plan.slices[static_cast<std::size_t>(gate.slice)].source);
      for (std::int64_t t = 0; t < plan.grid.num_tiles(); ++t) {
        const Tile& tile = plan.grid.tile(t);
        for (const MoeGroup& group : layout.groups) {
          const bool reads =
              group.row_begin < tile.row_begin + tile.rows && tile.row_begin < group.row_begin + group.rows;
          if (reads && group.owner != plan.rank) expected.emplace(t, group.owner);
        }
      }
      EXPECT_EQ(waits, expected);
      for (std::int32_t step = 1; step < plan.world_size; ++step) {
        EXPECT_EQ(plan.slices[static_cast<std::size_t>(step) - 1].source,
                  (plan.rank - step + plan.world_size) % plan.world_size);
      }
      if (HasFailure()) return;
    }
  }
}

TEST(MoeLayout, AlgorithmOneByHand) {
  // Rank 0 has experts 0 and 1; rank 1 sends it 2 and 4 rows, rank 0 itself 3 and 0.
  const MoeLayout layout =
      moe_layout(small_options(0, MoePadding::kPaper, MoeOrder::kExpertMajor), small_counts());
  struct Row {
    std::int64_t expert, owner, row_begin, rows, padded_rows, owner_row;
  };
  const Row expected[] = {{0, 1, 0, 2, 4, 0}, {0, 0, 4, 3, 4, 0}, {1, 1, 8, 4, 4, 2}, {1, 0, 12, 0, 0, 3}};
  ASSERT_EQ(layout.groups.size(), std::size(expected));
  for (std::size_t i = 0; i < std::size(expected); ++i) {
    const MoeGroup& g = layout.groups[i];
    EXPECT_EQ(g.expert, expected[i].expert) << i;
    EXPECT_EQ(g.owner, expected[i].owner) << i;
    EXPECT_EQ(g.row_begin, expected[i].row_begin) << i;
    EXPECT_EQ(g.rows, expected[i].rows) << i;
    EXPECT_EQ(g.padded_rows, expected[i].padded_rows) << i;
    EXPECT_EQ(g.owner_row, expected[i].owner_row) << i;
  }
  EXPECT_EQ(layout.rows, 12);
  EXPECT_EQ(layout.valid_rows, 9);
  EXPECT_EQ(layout.send_rows, 9);
  EXPECT_EQ(layout.own_rows, 3);
}

TEST(MoeLayout, OwnersOfExpertMajorGroupsBeginWithTheNextRank) {
  MoePlanOptions options;
  options.world_size = 4;
  options.num_experts = 4;
  const MoeCounts counts{4, 4, std::vector<std::int64_t>(16, 1)};
  const auto owners = [&](std::int32_t rank, MoeOrder order) {
    options.rank = rank;
    options.order = order;
    std::vector<std::int32_t> result;
    for (const MoeGroup& group : moe_layout(options, counts).groups) result.push_back(group.owner);
    return result;
  };
  EXPECT_THAT(owners(0, MoeOrder::kExpertMajor), testing::ElementsAre(1, 2, 3, 0));
  EXPECT_THAT(owners(2, MoeOrder::kExpertMajor), testing::ElementsAre(3, 0, 1, 2));
  EXPECT_THAT(owners(3, MoeOrder::kExpertMajor), testing::ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(owners(2, MoeOrder::kOwnerMajor), testing::ElementsAre(0, 1, 3, 2));
}

/// "expert: destination@row+rows …" of each band.
std::vector<std::string> bands_text(const MoePlanOptions& options) {
  std::vector<std::string> text;
  for (const MoeBand& band : moe_bands(options, small_counts())) {
    std::string line = fmt::format("{}:", band.expert);
    for (const MoeBandPart& part : band.parts) {
      line += fmt::format(" {}@{}+{}", part.destination, part.destination_row, part.rows);
    }
    text.push_back(line);
  }
  return text;
}

TEST(MoeBands, RemoteFirstAndExpertsWithMostRemoteBandsFirst) {
  // Rank 1 has experts 2 (5 rows of rank 0) and 3 (1 row of rank 0, 6 of its own).
  const std::vector<std::string> expected = {"2: 0@3+4", "2: 0@7+1", "3: 0@8+1", "3: 1@6+4", "3: 1@10+2"};
  EXPECT_EQ(bands_text(small_options(1, MoePadding::kPaper, MoeOrder::kExpertMajor)), expected);
  EXPECT_EQ(bands_text(small_options(1, MoePadding::kRagged, MoeOrder::kOwnerMajor)), expected);
  // Tiles run over the owners of an expert.
  const std::vector<std::string> shared = {"2: 0@3+4", "2: 0@7+1", "3: 0@8+1 1@6+3", "3: 1@9+3"};
  EXPECT_EQ(bands_text(small_options(1, MoePadding::kShared, MoeOrder::kExpertMajor)), shared);
  // Rule (ii): expert 1 has as many remote bands as expert 0, so they stay in their order.
  const std::vector<std::string> of_rank_0 = {"0: 1@0+2", "1: 1@2+4", "0: 0@0+3"};
  EXPECT_EQ(bands_text(small_options(0, MoePadding::kPaper, MoeOrder::kExpertMajor)), of_rank_0);
}

/// Channels of the puts to each rank.
std::map<std::int32_t, std::set<std::int32_t>> channels_of(const OverlapPlan& plan) {
  std::map<std::int32_t, std::set<std::int32_t>> channels;
  for (const Transfer& transfer : plan.transfers) channels[transfer.peer].insert(transfer.channel);
  return channels;
}

/// Puts to several ranks at a time use several ports; puts to one rank share one.
TEST_F(MoePlanTest, ConsumersAreSpreadOverRanks) {
  for (int round = 0; round < 40; ++round) {
    MoePlanOptions options;
    options.world_size = static_cast<std::int32_t>(pick(2, 9));
    options.num_experts = options.world_size * pick(1, 3);
    options.tile_m = 4;
    options.tile_n = 4;
    options.segment_bands = pick(1, 6);
    options.rank = static_cast<std::int32_t>(pick(0, options.world_size - 1));
    const std::int64_t consumers = pick(1, 16);
    options.resources = {1, consumers};
    MoeCounts counts{options.world_size, options.num_experts, {}};
    counts.rows.assign(static_cast<std::size_t>(options.world_size * options.num_experts), pick(1, 30));
    for (const Case& c : kCases) {
      if (c.transport != MoeTransport::kPut) continue;
      options.padding = c.padding;
      options.order = c.order;
      SCOPED_TRACE(text_of(options, counts, 8, 8) + fmt::format(" consumers {}", consumers));
      for (const OverlapPlan& plan :
           {plan_moe_dispatch(options, counts, 8, 8), plan_moe_combine(options, counts, 8, 8)}) {
        auto channels = channels_of(plan);
        channels.erase(options.rank);
        ASSERT_EQ(std::ssize(channels), options.world_size - 1);
        std::set<std::int32_t> all;
        std::size_t uses = 0;
        for (const auto& [peer, own] : channels) {
          EXPECT_LE(std::ssize(own), (consumers + options.world_size - 2) / (options.world_size - 1));
          EXPECT_GE(*own.begin(), 0);
          EXPECT_LT(*own.rbegin(), consumers);
          all.insert(own.begin(), own.end());
          uses += own.size();
        }
        if (consumers >= options.world_size - 1) {
          EXPECT_EQ(all.size(), uses) << "ranks share a consumer";
        }
        EXPECT_GE(std::ssize(all), std::min<std::int64_t>(consumers, options.world_size - 1));
      }
    }
  }
}

std::vector<std::int64_t> sizes_of(const std::vector<MoeSegment>& segments) {
  std::vector<std::int64_t> sizes;
  std::int64_t next = 0;
  for (const MoeSegment& segment : segments) {
    EXPECT_EQ(segment.first_band, next);
    next += segment.num_bands;
    sizes.push_back(segment.num_bands);
  }
  return sizes;
}

TEST(MoeSegments, FirstAndLastHaveOneBand) {
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(sizes_of(moe_segments(0, 0, 2)), Sizes({}));
  EXPECT_EQ(sizes_of(moe_segments(1, 0, 2)), Sizes({1}));
  EXPECT_EQ(sizes_of(moe_segments(2, 0, 2)), Sizes({1, 1}));
  EXPECT_EQ(sizes_of(moe_segments(3, 0, 2)), Sizes({1, 1, 1}));
  EXPECT_EQ(sizes_of(moe_segments(7, 0, 2)), Sizes({1, 2, 2, 1, 1}));
  EXPECT_EQ(sizes_of(moe_segments(8, 5, 3)), Sizes({1, 3, 3, 1, 3, 2}));
  EXPECT_EQ(sizes_of(moe_segments(0, 3, 2)), Sizes({2, 1}));
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "inner_bands must be at least 1, got 0",
                            static_cast<void>(moe_segments(1, 0, 0)));
}

TEST(MoeCapacity, TakesRowsInTheOrderOfRanks) {
  const MoeCounts counts{3, 2, {5, 1, 4, 2, 3, 0}};
  EXPECT_EQ(with_capacity(counts, 0).rows, counts.rows);
  EXPECT_EQ(with_capacity(counts, 7).rows, std::vector<std::int64_t>({5, 1, 2, 2, 0, 0}));
  EXPECT_EQ(with_capacity(counts, 12).rows, counts.rows);
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "capacity must be at least 0, got -1",
                            static_cast<void>(with_capacity(counts, -1)));
}

/// Balanced: each rank sends `rows` rows to each expert.
MoeWaste waste_of(std::int32_t world_size, std::int64_t experts, std::int64_t rows, MoePadding padding) {
  MoePlanOptions options;
  options.world_size = world_size;
  options.num_experts = experts;
  options.padding = padding;
  options.order = MoeOrder::kExpertMajor;
  const auto numbers = static_cast<std::size_t>(world_size * experts);
  return moe_waste(options, {world_size, experts, std::vector<std::int64_t>(numbers, rows)});
}

TEST(MoeWaste, GrowsWithRanksInThePaperAndWithExpertsHere) {
  // 32 ranks, 2 experts a rank, 65 rows of each rank for each expert: just over half a tile of 128.
  const MoeWaste paper = waste_of(32, 64, 65, MoePadding::kPaper);
  EXPECT_EQ(paper.wasted_rows(), 2 * 32 * (128 - 65));
  const MoeWaste shared = waste_of(32, 64, 65, MoePadding::kShared);
  EXPECT_EQ(shared.valid_rows, 2 * 32 * 65);
  EXPECT_LE(shared.wasted_rows(), shared.experts * 128) << "more than one tile an expert";
  EXPECT_EQ(shared.wasted_rows(), 2 * (17 * 128 - 32 * 65));
  // No rows, no bands.
  EXPECT_EQ(waste_of(4, 8, 0, MoePadding::kShared).computed_rows, 0);
}

TEST(MoeConsumerBudget, KeepsUpWithTheProducer) {
  // 10 units compute 90 us; one unit sends 1 GB/s: 100 kB take 100 us on one, when the rest computes 100 us.
  EXPECT_EQ(moe_consumer_budget(10, 1e5, 90, 1, 100), 1);
  EXPECT_EQ(moe_consumer_budget(10, 2e5, 90, 1, 100), 2);  // 100 us against 112 us
  EXPECT_EQ(moe_consumer_budget(10, 1e6, 1, 1, 3), 3) << "the link is full";
  EXPECT_EQ(moe_consumer_budget(10, 1e9, 1, 1, 100), 9);
  EXPECT_EQ(moe_consumer_budget(10, 0, 1, 1, 100), 1);
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "unit_gbps is 0; a finite number > 0 is expected",
                            static_cast<void>(moe_consumer_budget(10, 1, 1, 0, 1)));
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "units must be at least 2, got 1",
                            static_cast<void>(moe_consumer_budget(1, 1, 1, 1, 1)));
}

TEST(MoePlanErrors, NameWhatDoesNotHold) {
  const auto message = [](const auto& change) {
    MoePlanOptions options = small_options(0, MoePadding::kRagged, MoeOrder::kOwnerMajor);
    MoeCounts counts = small_counts();
    change(options, counts);
    return test::message_of(ErrorKind::kBadArgument,
                            [&] { static_cast<void>(plan_moe_dispatch(options, counts, 8, 8)); });
  };
  using testing::HasSubstr;
  EXPECT_THAT(message([](auto& o, auto&) { o.rank = 2; }), HasSubstr("rank 2 is not in [0, 2)"));
  EXPECT_THAT(message([](auto& o, auto&) { o.tile_m = 0; }), HasSubstr("tile_m must be at least 1, got 0"));
  EXPECT_THAT(message([](auto& o, auto&) { o.segment_bands = 0; }),
              HasSubstr("segment_bands must be at least 1, got 0"));
  EXPECT_THAT(message([](auto&, auto& c) { c.rows[5] = -4; }), HasSubstr("rank 1 sends -4 rows to expert 1"));
  EXPECT_THAT(message([](auto&, auto& c) { c.rows.pop_back(); }),
              HasSubstr("counts are 7 numbers for 2 ranks and 4 experts; expected 2 x 4"));
  EXPECT_THAT(message([](auto& o, auto&) { o.padding = MoePadding::kShared; }),
              HasSubstr("it needs order 'expert-major', got 'owner-major'"));
  EXPECT_THAT(
      message([](auto& o, auto&) {
        o.transport = MoeTransport::kCollective;
        o.padding = MoePadding::kPaper;
      }),
      HasSubstr("transport 'collective' needs order 'owner-major' and padding 'ragged', got 'owner-major' "
                "and 'paper'"));
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument,
                            "padding 'none' is not known; one of paper, ragged, shared is expected",
                            static_cast<void>(parse_moe_padding("none")));
}

TEST(MoePlanText, ShowsLayoutCombinePlanSegmentsAndWaste) {
  const std::string text =
      moe_plan_text(small_options(1, MoePadding::kPaper, MoeOrder::kExpertMajor), small_counts());
  for (const char* part :
       {"moe-layer, rank 1 of 2, experts 2 to 3 of 4", "combine plan: 5 row bands", "-> 0: 3, 4",
        "segments: 4", "wasted rows: 8 of 20 computed (5 bands, 2 experts"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
}

}  // namespace
}  // namespace flashoverlap

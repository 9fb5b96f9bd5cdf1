#include <gtest/gtest.h>

#include <functional>

#include "flashoverlap/moe_plan.h"
#include "flashoverlap/plan_builders.h"
#include "plan/hand_made.h"

/// Valid plans with one thing broken: verify says no, and why.
namespace flashoverlap::test {
namespace {

PlanOptions options() {
  PlanOptions o;
  o.world_size = 2;
  o.m = 8;
  o.n = 6;
  o.k = 4;
  o.tile_m = 4;
  o.tile_n = 4;
  o.partition = {1, 2, 1};
  return o;
}

struct Mutation {
  const char* name;
  std::function<void(OverlapPlan&)> apply;
  std::string reason;  ///< Contained in the reason given.
};

void expect_refused(const OverlapPlan& valid, const std::vector<Mutation>& mutations) {
  ASSERT_EQ(verify(valid).reason, "");
  for (const Mutation& mutation : mutations) {
    SCOPED_TRACE(mutation.name);
    OverlapPlan plan = valid;
    mutation.apply(plan);
    const std::string reason = verify(plan).reason;
    EXPECT_NE(reason.find(mutation.reason), std::string::npos)
        << "reason: " << reason << "\nexpected: " << mutation.reason;
    EXPECT_EQ(reason.find('\n'), std::string::npos);
  }
}

TEST(VerifyTest, HandMadePlansOfTheOtherSystemsHold) {
  for (const auto& plans : {all_gather_gemm(), tail_free_reduce_scatter(), put_to_owners()}) {
    for (const OverlapPlan& plan : plans)
      EXPECT_EQ(verify(plan).reason, "") << plan.operation << " rank " << plan.rank;
  }
}

TEST(VerifyTest, Header) {
  expect_refused(
      plan_all_reduce(options()),
      {{"world", [](auto& p) { p.world_size = 0; }, "world_size must be at least 1, got 0"},
       {"rank", [](auto& p) { p.rank = 2; }, "rank 2 is not in [0, 2)"},
       {"units", [](auto& p) { p.resources.compute_units = 0; }, "compute_units must be at least 1, got 0"},
       {"output", [](auto& p) { p.output_rows = -1; }, "the output of -1 x 6"},
       {"problems",
        [](auto& p) {
          p.grid = TileGrid({{.rows = 4, .cols = 6}, {.row_begin = 3, .rows = 4, .cols = 6}}, 4, 4, 4);
        },
        "problems 0 and 1 of the grid overlap at row 3, column 0"}});
}

TEST(VerifyTest, ScheduleAndGroups) {
  expect_refused(
      plan_all_reduce(options()),
      {{"out of range", [](auto& p) { p.schedule[2] = 4; },
        "position 2 of the schedule holds tile 4, which is not in [0, 4)"},
       {"twice", [](auto& p) { p.schedule[3] = 1; }, "tile 1 is scheduled twice, at positions 1 and 3"},
       {"missing", [](auto& p) { p.schedule.pop_back(); }, "tile 3 is not scheduled"},
       {"swapped across groups", [](auto& p) { std::swap(p.schedule[0], p.schedule[2]); },
        "transfer 0 (all-reduce after group 0) reads elements [0, 16) of the packed buffer, but nothing "
        "makes it wait for group 1, which is at elements [0, 24)"},
       {"gap", [](auto& p) { p.groups[1].first_position = 2; },
        "group 1 begins at position 2, but the groups before it end at position 1"},
       {"too many", [](auto& p) { p.groups[2].num_tiles = 2; },
        "group 2 has 2 tiles from position 3 on, but the schedule has 4"},
       {"too few", [](auto& p) { p.groups.pop_back(); },
        "the groups end at position 3, but the schedule has 4: tile 3 is in no group"},
       {"moved border",
        [](auto& p) {
          p.groups[1] = {1, 1};
          p.groups[2] = {2, 2};
        },
        "transfer 1 (all-reduce after group 1) reads elements [16, 40) of the packed buffer, but nothing "
        "makes it wait for group 2"}});
  PlanOptions o = options();
  o.partition = {2, 2};
  expect_refused(
      plan_all_reduce(o),
      {{"torn apart", [](auto& p) { std::swap(p.schedule[1], p.schedule[3]); },
        "group 0 is not contiguous in the packed buffer: tile 3 at element 40 lies behind group 1"}});
}

TEST(VerifyTest, Placement) {
  expect_refused(
      plan_all_reduce(options()),
      {{"overlap", [](auto& p) { p.placement.segments[1].offset -= 1; },
        "tiles 0 and 1 are both placed at element 15"},
       {"outside", [](auto& p) { p.placement.segments[3].offset = 41; },
        "tile 3: segment 0 has offset 41 and 8 elements, outside the packed buffer of 48"},
       {"negative", [](auto& p) { p.placement.segments[0].offset = -1; }, "tile 0: segment 0 has offset -1"},
       {"gap", [](auto& p) { ++p.packed_size; }, "no tile is placed at elements [48, 49)"},
       {"rows", [](auto& p) { p.placement.segments[0].rows = 3; }, "tile 0: rows [3, 4) are placed nowhere"},
       {"rows begin", [](auto& p) { p.placement.segments[2].row_begin = 1; },
        "tile 2: segment 0 places 4 rows from row 1 on"},
       {"table size", [](auto& p) { p.placement.first_segment.pop_back(); },
        "first_segment has 4 entries for 4 tiles"},
       {"table end", [](auto& p) { p.placement.first_segment.back() = 3; },
        "runs from 0 to 3, but there are 4 segments"},
       {"table order", [](auto& p) { p.placement.first_segment[1] = 3; },
        "first_segment falls from 3 to 2 at tile 1"},
       {"unplaced", [](auto& p) { p.placement.first_segment[1] = 0; },
        "tile 1: segment 1 places 4 rows from row 0 on, but the tile has 4 rows and row 4"}});
}

TEST(VerifyTest, AllReduceTransfers) {
  expect_refused(
      plan_all_reduce(options()),
      {{"dropped", [](auto& p) { p.transfers.erase(p.transfers.begin() + 1); },
        "tile 1 of group 1, at elements [16, 24) of the packed buffer, is not sent"},
       {"trigger too early", [](auto& p) { p.transfers[1].trigger.index = 0; },
        "transfer 1 (all-reduce after group 0) reads elements [16, 40) of the packed buffer, but nothing "
        "makes it wait for group 1"},
       {"trigger out of range", [](auto& p) { p.transfers[1].trigger.index = 3; },
        "transfer 1 is set off by group 3, which is not in [0, 3)"},
       {"at the start", [](auto& p) { p.transfers[0].trigger = {}; }, "nothing makes it wait for group 0"},
       {"no slice",
        [](auto& p) {
          p.transfers[0].trigger = {TriggerKind::kSlice, 0};
        },
        "transfer 0 is set off by slice 0"},
       {"not in place", [](auto& p) { p.transfers[0].destination.offset = 1; }, "must be in place"},
       {"shorter", [](auto& p) { p.transfers[1].source.count = p.transfers[1].destination.count = 23; },
        "tile 2 of group 1, at elements [24, 40) of the packed buffer, is not sent as a whole"},
       {"twice",
        [](auto& p) {
          p.transfers[2].source = p.transfers[2].destination = {BufferKind::kPacked, 39, 9};
        },
        "both write element 39 of the packed buffer"},
       {"outside",
        [](auto& p) {
          p.transfers[2].source = p.transfers[2].destination = {BufferKind::kPacked, 40, 9};
        },
        "has offset 40 and count 9, outside the packed buffer of 48 elements"},
       {"huge", [](auto& p) { p.transfers[2].source.count = std::numeric_limits<std::int64_t>::max(); },
        "outside the packed buffer"},
       {"peer", [](auto& p) { p.transfers[0].peer = 1; }, "is collective, but has peer 1"},
       {"channel", [](auto& p) { p.transfers[0].channel = -2; }, "transfer 0 has channel -2"},
       {"counts",
        [](auto& p) {
          p.transfers[0].send_counts = {8, 8};
        },
        "has 2 send_counts and 0 receive_counts; expected none"},
       {"slice", [](auto& p) { p.transfers[0].slice = 0; }, "brings slice 0, which is not in [0, 0)"}});
}

TEST(VerifyTest, AllReduceInPlace) {
  PlanOptions o = options();
  o.partition = {4};
  expect_refused(
      plan_all_reduce(o),
      {{"dropped", [](auto& p) { p.transfers.clear(); },
        "tiles write 48 elements of the output in place, but transfers reduce only 0"},
       {"shorter", [](auto& p) { p.transfers[0].source.count = p.transfers[0].destination.count = 47; },
        "reduce only 47"},
       {"early", [](auto& p) { p.transfers[0].trigger = {}; },
        "reads tile 0 in the output, but nothing makes it wait for group 0"},
       {"output", [](auto& p) { p.output_rows = 9; }, "of 9 x 6 = 54 elements of the output tiles write 48"},
       {"outside",
        [](auto& p) {
          p.output_cols = 5, p.transfers[0].source.count = p.transfers[0].destination.count = 40;
        },
        "tile 1 is written in place at rows [0, 4), columns [4, 6), outside the output of 8 x 5"}});
}

TEST(VerifyTest, ReduceScatterTransfers) {
  PlanOptions o = options();
  o.m = 7;
  o.rank = 1;
  expect_refused(plan_reduce_scatter(o, RowOwnership::kBlockCyclic),
                 {{"other chunk",
                   [](auto& p) {
                     p.transfers[0].destination = {BufferKind::kPacked, 0, 8};
                   },
                   "must write its own chunk, elements [8, 16)"},
                  {"counts",
                   [](auto& p) {
                     p.transfers[1].send_counts = {1, 2};
                   },
                   "counts sum to 3, but the region has"},
                  {"negative",
                   [](auto& p) {
                     p.transfers[1].send_counts = {-1, 2};
                   },
                   "counts[0] is -1"},
                  {"ranks",
                   [](auto& p) {
                     p.transfers[1].send_counts = {1, 2, 3};
                   },
                   "counts has 3 entries; expected one for each of 2 ranks"},
                  {"equal",
                   [](auto& p) {
                     p.transfers[1].send_counts.clear();
                     p.world_size = 3;
                   },
                   "cannot be shared equally by 3 ranks"}});
}

TEST(VerifyTest, AllToAllTransfers) {
  PlanOptions o = options();
  o.partition = {2, 1, 1};
  const Routing routing{{{0, 1, 1, 0, 1, 1, 0, 0}, {0, 0, 1}}};
  expect_refused(
      plan_all_to_all(o, routing),
      {{"send counts", [](auto& p) { ++p.transfers[0].send_counts[0]; },
        "send_counts sum to 25, but the source has 24"},
       {"receive counts", [](auto& p) { ++p.transfers[0].receive_counts[1]; }, "but the destination has"},
       {"no counts", [](auto& p) { p.transfers[0].send_counts.clear(); },
        "send_counts has 0 entries; expected one for each of 2 ranks"},
       {"dropped", [](auto& p) { p.transfers.pop_back(); }, "tile 3 of group 2"},
       {"in place", [](auto& p) { p.transfers[0].destination.buffer = BufferKind::kPacked; },
        "must not be in place"},
       {"received", [](auto& p) { p.received_size = 30; }, "outside the received buffer of 30 elements"}});
}

TEST(VerifyTest, Restore) {
  PlanOptions o = options();
  expect_refused(
      plan_all_reduce(o),
      {{"piece overlap", [](auto& p) { p.restore.pieces[1].offset = 12; },
        "restore piece 1 of band 0 reads 4 x 2 elements for column 4 at offset 12, where tile 0 has column "
        "0"},
       {"exchanged", [](auto& p) { std::swap(p.restore.pieces[0].offset, p.restore.pieces[2].offset); },
        "restore band 0 mixes rows 4 and 0 of the product"},
       {"outside", [](auto& p) { p.restore.pieces[3].offset = 41; },
        "restore piece 3 of band 1 has offset 41 and count 8, outside the packed buffer"},
       {"columns", [](auto& p) { p.restore.pieces[1].col_begin = 3; },
        "restore piece 1 of band 0 covers 2 columns from column 3 on, but column 4 of 6 comes next"},
       {"columns missing", [](auto& p) { p.restore.bands[0].num_pieces = 1; },
        "restore band 0 leaves columns [4, 6) unwritten"},
       {"rows", [](auto& p) { p.restore.bands[1].row_begin = 3; },
        "restore band 1 covers 4 rows from row 3 on, but row 4 of 8 comes next"},
       {"rows missing", [](auto& p) { p.restore.bands.pop_back(); },
        "the restore leaves rows [4, 8) unwritten"},
       {"pieces", [](auto& p) { p.restore.bands[1].first_piece = 3; },
        "restore band 1 has 2 pieces from piece 3 on, but there are 4"},
       {"none", [](auto& p) { p.restore.bands.clear(); },
        "there is no restore, but of 8 x 6 = 48 elements of the output tiles write 0"},
       {"buffer", [](auto& p) { p.restore.source = BufferKind::kInput; },
        "the restore reads the input buffer; expected packed or received"},
       {"bands exchanged",
        [](auto& p) { std::swap(p.restore.bands[0].first_piece, p.restore.bands[1].first_piece); },
        "restore band 1 begins at row 0 of the product, but the band before ends at row 8"}});
}

TEST(VerifyTest, RestoreAroundRowsInPlace) {
  // Rank 1 keeps 2 of its 5 rows: rows 3 and 4 of the output, row 3 and 4 of its grid.
  MoePlanOptions o;
  o.rank = 1;
  o.world_size = 2;
  o.num_experts = 2;
  o.tile_m = 4;
  o.tile_n = 4;
  const OverlapPlan plan = plan_moe_combine(o, {2, 2, {2, 3, 3, 2}}, 6, 4);
  ASSERT_EQ(plan.restore.bands.size(), 1U);
  expect_refused(plan,
                 {{"overwritten", [](auto& p) { p.restore.bands[0].rows = 4; },
                   "restore band 0 overwrites row 3, which a tile writes in place"},
                  {"gap", [](auto& p) { p.output_row_shift = -1; }, "restore band 0 overwrites row 2"},
                  {"outside", [](auto& p) { p.output_row_shift = 1; },
                   "tile 2 is written in place at rows [4, 6), columns [0, 4), outside the output of 5 x 6"},
                  {"not written", [](auto& p) { p.restore.bands.clear(); },
                   "there is no restore, but of 5 x 6 = 30 elements of the output tiles write 12"},
                  {"begins too late",
                   [](auto& p) {
                     p.restore.bands[0].row_begin = 1;
                     p.restore.bands[0].rows = 2;
                   },
                   "restore band 0 covers 2 rows from row 1 on, but row 0 of 5 comes next"},
                  {"ends too early", [](auto& p) { p.restore.bands[0].rows = 2; },
                   "the restore leaves rows [2, 5) unwritten"}});
}

TEST(VerifyTest, RestoreOfReceivedRows) {
  PlanOptions o = options();
  const Routing routing{{{0, 1, 1, 0, 1, 1, 0, 0}, {0, 0, 1}}};
  const OverlapPlan plan = plan_all_to_all(o, routing);
  ASSERT_EQ(plan.restore.pieces.size(), 6U);
  expect_refused(plan, {{"twice", [](auto& p) { p.restore.pieces[2].offset = p.restore.pieces[0].offset; },
                         "the restore reads element 0 of the received buffer twice"},
                        {"nothing there",
                         [](auto& p) {
                           p.received_size += 8;
                           p.restore.pieces[0].offset = p.received_size - 8;
                         },
                         "but nothing finished arrives at element"}});
}

TEST(VerifyTest, StartGates) {
  expect_refused(
      all_gather_gemm()[0],
      {{"dropped", [](auto& p) { p.gates.clear(); },
        "tile 1 reads rows [2, 4) of the input buffer from k 0 on, but has no start gate that waits there "
        "for slice 0"},
       {"other tile", [](auto& p) { p.gates[0].tile = 0; }, "tile 1 reads rows [2, 4)"},
       {"too late", [](auto& p) { p.gates[0].k_begin = 1; }, "from k 0 on, but has no start gate"},
       {"k", [](auto& p) { p.gates[0].k_begin = 3; }, "has k_begin 3, which is not in [0, 2]"},
       {"slice", [](auto& p) { p.gates[0].slice = 1; },
        "gate 0 of tile 1 waits for slice 1, which is not in [0, 1)"},
       {"tile", [](auto& p) { p.gates[0].tile = 2; }, "gate 0 holds tile 2, which is not in [0, 2)"},
       {"order", [](auto& p) { p.gates.push_back({.tile = 0, .slice = 0}); },
        "gates are not sorted by tile: gate 0 holds tile 1, gate 1 tile 0"},
       {"region", [](auto& p) { p.slices[0].region.offset = 3; },
        "brings slice 0, which is elements [3, 7) of the input buffer"},
       {"source", [](auto& p) { p.slices[0].source = 0; }, "brings slice 0, but that comes from rank 0"},
       {"source rank", [](auto& p) { p.slices[0].source = 2; },
        "slice 0 comes from rank 2, which is not in [0, 2)"},
       {"finish", [](auto& p) { p.gates[0].point = GatePoint::kFinish; },
        "that slice arrives in the input buffer; expected the received buffer"},
       {"no slice", [](auto& p) { p.transfers[1].slice = -1; },
        "writes into the input buffer, but brings no slice"},
       {"twice", [](auto& p) { p.transfers.push_back(p.transfers[1]); },
        "slice 0 is brought twice, by transfers 1 and 2"},
       {"send slice", [](auto& p) { p.transfers[0].slice = 0; }, "must not mark slice 0 as arrived"},
       {"to itself", [](auto& p) { p.transfers[0].peer = 0; }, "peer 0 is this rank itself"},
       {"peer", [](auto& p) { p.transfers[0].peer = 2; }, "peer 2 is not in [0, 2)"},
       {"read early", [](auto& p) { p.transfers[0].source.offset = 4; },
        "transfer 0 (send to rank 1 at the start) reads elements [4, 8) of the input buffer, but nothing "
        "makes it wait for transfer 1"}});
}

TEST(VerifyTest, SliceThatArrivesInTheMiddleOfARowMayBeGatedFromThereOn) {
  OverlapPlan plan = all_gather_gemm()[0];
  plan.grid = TileGrid({{.rows = 2, .cols = 8}}, 4, 1, 8);
  plan.output_rows = 2;
  plan.output_cols = 8;
  plan.slices[0].region = plan.transfers[1].destination = {BufferKind::kInput, 5, 3};
  plan.gates[0].k_begin = 1;
  EXPECT_EQ(verify(plan).reason, "");
  plan.gates[0].k_begin = 2;
  EXPECT_NE(verify(plan).reason.find("tile 1 reads rows [1, 2) of the input buffer from k 1 on"),
            std::string::npos);
}

TEST(VerifyTest, GatheredWeightsAreGatedByTheirColumns) {
  OverlapPlan plan = all_gather_gemm()[0];
  plan.grid = TileGrid({{.rows = 4, .cols = 4}}, 2, 4, 2);
  plan.slices[0].region = plan.transfers[1].destination = {BufferKind::kWeight, 4, 4};
  plan.transfers[0].source = {BufferKind::kWeight, 0, 4};
  EXPECT_EQ(verify(plan).reason, "");
  plan.gates[0].tile = 0;
  EXPECT_NE(verify(plan).reason.find("tile 1 reads rows [2, 4) of the weight buffer"), std::string::npos);
}

TEST(VerifyTest, InputBlocksMakeUpAAndAreWaitedFor) {
  PlanOptions options{.rank = 0,
                      .world_size = 2,
                      .m = 4,
                      .n = 4,
                      .k = 6,
                      .tile_m = 2,
                      .tile_n = 4,
                      .resources = {},
                      .partition = {}};
  const OverlapPlan plan = plan_all_to_all_gemm(options, {});
  ASSERT_EQ(plan.input_blocks.size(), 2U);
  EXPECT_EQ(plan.passes(), (std::vector<std::int64_t>{0, 3}));
  expect_refused(
      plan,
      {{"depth", [](auto& p) { p.input_blocks[0].depth = 0; },
        "input block 0 has columns from 0 on, 0 of them; expected at least one inside [0, 6)"},
       {"outside", [](auto& p) { p.input_blocks[1].k_begin = 4; },
        "input block 1 has columns from 4 on, 3 of them; expected at least one inside [0, 6)"},
       {"buffer", [](auto& p) { p.input_blocks[1].buffer = BufferKind::kPacked; },
        "input block 1 is in the packed buffer; expected input or received"},
       {"region", [](auto& p) { p.input_blocks[1].offset = 1; },
        "input block 1 has offset 1 and count 6, outside the received buffer of 6 elements"},
       {"twice", [](auto& p) { p.input_blocks[1].k_begin = 2; },
        "input blocks: columns of A are taken up to 3, and next from 2 on; expected each once"},
       {"missing", [](auto& p) { p.input_blocks.pop_back(); },
        "input blocks: columns [3, 6) of A are in none"},
       {"shape", [](auto& p) { p.input_rows = -1; }, "the input buffer of -1 x 3 is not a matrix"},
       {"shape alone", [](auto& p) { p.input_blocks.clear(); },
        "there are no input blocks, but the input buffer is said to hold 4 x 3"},
       {"no gate", [](auto& p) { p.gates.clear(); },
        "tile 0 reads input block 1 from element 3 of the main loop on, but has no start gate that waits "
        "there "
        "for slice 0"},
       {"late", [](auto& p) { p.gates[0].k_begin = 4; },
        "tile 0 reads input block 1 from element 3 of the main loop on"},
       {"nothing arrives", [](auto& p) { p.slices[0].region.count = p.transfers[1].destination.count = 3; },
        "tile 0 reads element 3 of the received buffer for input block 1, but no slice arrives there"}});
}

TEST(VerifyTest, FinishGates) {
  expect_refused(
      tail_free_reduce_scatter()[0],
      {{"dropped", [](auto& p) { p.gates.clear(); },
        "tile 0 of group 1, at elements [8, 16) of the packed buffer, is not sent"},
       {"other tile", [](auto& p) { p.gates[0].tile = 1; }, "tile 0 of group 1"},
       {"offset", [](auto& p) { p.gates[0].offset = 1; },
        "adds 8 elements at offset 1, outside the slice, which is elements [0, 8) of the received buffer"},
       {"negative", [](auto& p) { p.gates[0].offset = -1; }, "adds 8 elements at offset -1"},
       {"twice", [](auto& p) { p.gates.push_back(p.gates[0]); }, "both add element 0 of the received buffer"},
       {"restores the sent tile", [](auto& p) { p.restore.pieces[0].offset = 0; },
        "but nothing finished arrives at element 0"},
       {"unread",
        [](auto& p) {
          p.received_size = 16;
          p.slices[0].region.count = p.transfers[0].destination.count = 16;
        },
        "leaves 16 elements at [0, 16) of the received buffer, but only 8 of them are restored, added or "
        "sent on"}});
}

TEST(VerifyTest, MessagesPerPair) {
  PlanOptions options;
  options.world_size = 2;
  options.m = options.n = options.k = 8;
  options.tile_m = options.tile_n = 2;
  const OverlapPlan plan = plan_tail_free_reduce_scatter(options, {.sizes = {}, .parts = 3});
  EXPECT_EQ(plan.messages_per_pair, 3);
  expect_refused(plan, {{"negative", [](auto& p) { p.messages_per_pair = -1; },
                         "messages_per_pair is -1; expected at least 0"},
                        {"too few", [](auto& p) { p.messages_per_pair = 2; },
                         "more than messages_per_pair, 2, messages go to rank 1"},
                        {"too few received",
                         [](auto& p) {
                           p.messages_per_pair = 2;
                           std::erase_if(p.transfers,
                                         [](const Transfer& t) { return t.kind == TransferKind::kSend; });
                         },
                         "more than messages_per_pair, 2, messages go here from rank 1"}});
}

TEST(VerifyTest, Puts) {
  expect_refused(
      put_to_owners()[0],
      {{"no slice", [](auto& p) { p.transfers[0].slice = -1; },
        "marks no slice, so the peer could not know that it has arrived"},
       {"sizes", [](auto& p) { p.transfers[0].destination.count = 3; }, "reads 4 elements and writes 3"},
       {"early", [](auto& p) { p.transfers[2].trigger.index = 0; }, "nothing makes it wait for group 1"},
       {"collision", [](auto& p) { p.slices[1].region.offset = 2; },
        "both write element 2 of the received buffer"},
       {"unsent", [](auto& p) { p.transfers.pop_back(); },
        "tile 1 of group 1, at elements [12, 16) of the packed buffer, is not sent"}});
}

}  // namespace
}  // namespace flashoverlap::test

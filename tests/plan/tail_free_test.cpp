/// Tail-free plans (arXiv 2604.24013): they hold, and carried out on tags, independently of every executor,
/// they give what the operations mean.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "flashoverlap/plan_builders.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap::test {
namespace {

enum class Kind { kGatherRows, kGatherColumns, kReduceScatter, kHeads, kFromHeads };

struct Case {
  Kind kind = Kind::kGatherRows;
  PlanOptions options;
  SliceOptions slices;
  HeadSlices heads;

  [[nodiscard]] OverlapPlan plan(std::int32_t rank) const {
    PlanOptions own = options;
    own.rank = rank;
    switch (kind) {
      case Kind::kGatherRows:
        return plan_all_gather_gemm(own, slices);
      case Kind::kGatherColumns:
        return plan_all_gather_gemm(own, slices, SliceAxis::kColumns);
      case Kind::kReduceScatter:
        return plan_tail_free_reduce_scatter(own, slices);
      case Kind::kHeads:
        return plan_gemm_all_to_all(own, heads);
      case Kind::kFromHeads:
        return plan_all_to_all_gemm(own, heads);
    }
    return {};
  }
  [[nodiscard]] OverlapPlan serial_plan(std::int32_t rank, std::int64_t num_slices) const {
    PlanOptions own = options;
    own.rank = rank;
    switch (kind) {
      case Kind::kGatherRows:
        return plan_sliced_all_gather_gemm(own, slices, num_slices);
      case Kind::kGatherColumns:
        return plan_sliced_all_gather_gemm(own, slices, num_slices, SliceAxis::kColumns);
      case Kind::kReduceScatter:
        return plan_reduce_scatter(own, slices);
      case Kind::kHeads:
        return plan_sliced_gemm_all_to_all(own, heads, num_slices);
      case Kind::kFromHeads:
        return plan_sliced_all_to_all_gemm(own, heads, num_slices);
    }
    return {};
  }
  template <typename Make>
  [[nodiscard]] std::vector<OverlapPlan> all(const Make& make) const {
    std::vector<OverlapPlan> plans;
    for (std::int32_t rank = 0; rank < options.world_size; ++rank) plans.push_back(make(rank));
    return plans;
  }
  [[nodiscard]] std::vector<OverlapPlan> plans() const {
    return all([&](std::int32_t rank) { return plan(rank); });
  }
  [[nodiscard]] std::string text() const {
    return fmt::format(
        "kind {} world {} m {} n {} k {} tile {}x{} swizzle {} units {} slices [{}] parts {} channels {} "
        "rows [{}] columns [{}] parts {} channels {}",
        static_cast<int>(kind), options.world_size, options.m, options.n, options.k, options.tile_m,
        options.tile_n, options.swizzle, options.resources.compute_units, fmt::join(slices.sizes, ","),
        slices.parts, slices.send_channels, fmt::join(heads.rows.sizes, ","),
        fmt::join(heads.columns.sizes, ","), heads.columns.parts, heads.columns.send_channels);
  }
};

class TailFreePlans : public SeededTest {
 protected:
  /// Uneven, some empty; or left to the library.
  SliceOptions slices(std::int64_t size, std::int32_t world_size) {
    SliceOptions slices{.sizes = {}, .parts = pick(0, 4), .send_channels = pick(0, 4)};
    if (pick(0, 2) == 0) return slices;
    std::vector<std::int64_t> cuts{0, size};
    for (std::int32_t i = 1; i < world_size; ++i) cuts.push_back(pick(0, size));
    std::ranges::sort(cuts);
    for (std::int32_t i = 0; i < world_size; ++i) {
      slices.sizes.push_back(cuts[static_cast<std::size_t>(i) + 1] - cuts[static_cast<std::size_t>(i)]);
    }
    return slices;
  }

  Case next() {
    Case c;
    c.kind = static_cast<Kind>(pick(0, 4));
    PlanOptions& o = c.options;
    o.world_size = static_cast<std::int32_t>(pick(1, 9));
    o.dtype = static_cast<DType>(pick(0, 2));
    o.m = pick(0, 9) == 0 ? 0 : pick(1, 60);
    o.n = pick(0, 9) == 0 ? 0 : pick(1, 60);
    o.k = pick(0, 6);
    o.tile_m = pick(1, 16);
    o.tile_n = pick(1, 16);
    o.swizzle = pick(1, 4);
    o.resources = {pick(1, 6), 0};
    c.slices = slices(c.kind == Kind::kGatherColumns ? o.n : o.m, o.world_size);
    if (c.kind == Kind::kFromHeads) o.k = pick(0, 40);
    c.heads = {slices(o.m, o.world_size), slices(c.kind == Kind::kFromHeads ? o.k : o.n, o.world_size)};
    return c;
  }
};

/// Contributions as one bit per rank and the place in the product.
using Tag = std::int64_t;
constexpr Tag kNothing = -(Tag{1} << 60U);

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

Tag tag(std::int64_t rank, std::int64_t row, std::int64_t col) {
  return (Tag{1} << (32 + rank)) + (row << 16) + col;
}

/// One rank: computes a tile when all that it waits for is there, and sends what is complete.
class Rank {
 public:
  /// `first_column`: of A, of this rank's heads.
  Rank(const OverlapPlan& plan, std::int64_t first_column)
      : plan_(plan),
        packed_(at(plan.packed_size), kNothing),
        received_(at(plan.received_size), kNothing),
        output_(at(plan.output_rows * plan.output_cols), kNothing),
        taken_(at(plan.grid.num_tiles())),
        passes_(plan.passes()),
        first_column_(first_column),
        arrived_(plan.slices.size(), false),
        sent_(plan.transfers.size(), false) {}

  void compute() {
    while (!finished() && may_run(tile_at_position())) {
      run(tile_at_position());
      ++position_;
    }
  }
  [[nodiscard]] bool finished() const { return position_ == num_tiles() * std::ssize(passes_); }
  [[nodiscard]] bool may_send(std::size_t i) const {
    const Transfer& t = plan_.transfers[i];
    if (t.kind != TransferKind::kSend || sent_[i]) return false;
    if (t.trigger.kind == TriggerKind::kStart) return true;
    const WaveGroup& group = plan_.groups[at(t.trigger.index)];
    return position_ - num_tiles() * (std::ssize(passes_) - 1) >= group.first_position + group.num_tiles;
  }
  /// What it sends; empty for gathered parts of the input, which have no tags here.
  std::vector<Tag> send(std::size_t i) {
    sent_[i] = true;
    const Region& source = plan_.transfers[i].source;
    if (source.buffer != BufferKind::kPacked) {
      std::vector<Tag> data;
      if (plan_.input_blocks.empty()) return data;
      for (std::int64_t e = source.offset; e < source.offset + source.count; ++e) data.push_back(input(e));
      return data;
    }
    const auto begin = packed_.begin() + source.offset;
    return {begin, begin + source.count};
  }
  void receive(std::size_t i, const std::vector<Tag>& data) {
    const Transfer& t = plan_.transfers[i];
    auto& buffer = t.destination.buffer == BufferKind::kOutput ? output_ : received_;
    for (std::size_t e = 0; e < data.size(); ++e) {
      Tag& to = buffer.at(at(t.destination.offset) + e);
      ASSERT_EQ(to, kNothing) << "written twice";
      to = data[e];
    }
    if (t.slice >= 0) arrived_[at(t.slice)] = true;
  }
  [[nodiscard]] Tag output(std::int64_t row, std::int64_t col) const {
    return output_[at(row * plan_.output_cols + col)];
  }
  [[nodiscard]] const OverlapPlan& plan() const { return plan_; }
  /// What the tile has multiplied with each of its rows of A, by column of A: (row, column) of the whole A.
  [[nodiscard]] const std::vector<std::vector<Tag>>& taken(std::int64_t tile) const {
    return taken_[at(tile)];
  }
  static Tag whole_a(std::int64_t row, std::int64_t column) { return (row << 16) + column; }

 private:
  [[nodiscard]] std::int64_t num_tiles() const { return std::ssize(plan_.schedule); }
  [[nodiscard]] std::int64_t tile_at_position() const { return plan_.schedule[at(position_ % num_tiles())]; }
  [[nodiscard]] std::int64_t pass_end() const {
    const std::size_t next = at(position_ / num_tiles() + 1);
    return next < passes_.size() ? passes_[next] : plan_.grid.k();
  }
  /// Element of an input with rows of all ranks and columns of this one.
  [[nodiscard]] Tag input(std::int64_t e) const {
    return whole_a(e / plan_.input_cols, first_column_ + e % plan_.input_cols);
  }
  [[nodiscard]] bool may_run(std::int64_t tile) const {
    const bool last = pass_end() == plan_.grid.k();
    return std::ranges::all_of(plan_.gates, [&](const Gate& gate) {
      const bool later = !last && (gate.point == GatePoint::kFinish || gate.k_begin >= pass_end());
      return gate.tile != tile || later || arrived_[at(gate.slice)];
    });
  }
  /// The pass's part of the main loop, row by row.
  void take_input(std::int64_t t) {
    const Tile& tile = plan_.grid.tile(t);
    const std::int64_t pass_begin = passes_[at(position_ / num_tiles())];
    taken_[at(t)].resize(at(tile.rows));
    std::int64_t loop = 0;
    for (const InputBlock& block : plan_.input_blocks) {
      for (std::int64_t j = 0; j < block.depth; ++j, ++loop) {
        if (loop < pass_begin || loop >= pass_end()) continue;
        for (std::int64_t i = 0; i < tile.rows; ++i) {
          auto& row = taken_[at(t)][at(i)];
          row.resize(at(plan_.grid.k()), kNothing);
          const std::int64_t e = block.offset + (tile.row_begin + i) * block.depth + j;
          Tag& to = row[at(block.k_begin + j)];
          ASSERT_EQ(to, kNothing) << "taken twice";
          to = block.buffer == BufferKind::kInput ? input(e) : received_.at(at(e));
        }
      }
    }
  }
  void run(std::int64_t t) {
    take_input(t);
    if (pass_end() < plan_.grid.k()) return;
    const Tile& tile = plan_.grid.tile(t);
    std::vector<Tag> values;
    for (std::int64_t i = 0; i < tile.rows; ++i) {
      for (std::int64_t j = 0; j < tile.cols; ++j) {
        values.push_back(tag(plan_.rank, tile.row_begin + i, tile.col_begin + j));
      }
    }
    for (const Gate& gate : plan_.gates) {
      if (gate.tile != t || gate.point != GatePoint::kFinish) continue;
      for (std::size_t e = 0; e < values.size(); ++e) values[e] += received_.at(at(gate.offset) + e);
    }
    for (std::int64_t i = 0; i < tile.rows; ++i) {
      for (std::int64_t j = 0; j < tile.cols; ++j) write(t, i, j, values[at(i * tile.cols + j)]);
    }
  }
  void write(std::int64_t t, std::int64_t i, std::int64_t j, Tag value) {
    const Tile& tile = plan_.grid.tile(t);
    std::vector<Tag>* buffer = &output_;
    std::int64_t offset = (tile.row_begin + i + plan_.output_row_shift) * plan_.output_cols + tile.col_begin +
                          j + plan_.output_col_shift;
    for (const PlacementSegment& s : plan_.placement.of_tile(t)) {
      if (i < s.row_begin || i >= s.row_begin + s.rows) continue;
      buffer = &packed_;
      offset = s.offset + (i - s.row_begin) * tile.cols + j;
    }
    Tag& to = buffer->at(at(offset));
    ASSERT_EQ(to, kNothing) << "written twice";
    to = value;
  }

  const OverlapPlan& plan_;
  std::vector<Tag> packed_, received_, output_;
  std::vector<std::vector<std::vector<Tag>>> taken_;
  std::vector<std::int64_t> passes_;
  std::int64_t first_column_ = 0;
  std::vector<bool> arrived_;
  std::vector<bool> sent_;
  std::int64_t position_ = 0;
};

/// Sends match receives pair by pair, in order.
void run_all(std::vector<Rank>& ranks) {
  std::map<std::pair<std::int32_t, std::int32_t>, std::size_t> next_receive;  // (source, destination)
  bool progress = true;
  while (progress) {
    progress = false;
    for (Rank& rank : ranks) {
      rank.compute();
      for (std::size_t i = 0; i < rank.plan().transfers.size(); ++i) {
        if (!rank.may_send(i)) continue;
        progress = true;
        const std::int32_t peer = rank.plan().transfers[i].peer;
        const std::vector<Tag> data = rank.send(i);
        Rank& receiver = ranks[at(peer)];
        std::size_t& next = next_receive[{rank.plan().rank, peer}];
        const auto& transfers = receiver.plan().transfers;
        while (next < transfers.size() && !(transfers[next].kind == TransferKind::kReceive &&
                                            transfers[next].peer == rank.plan().rank)) {
          ++next;
        }
        ASSERT_LT(next, transfers.size()) << "rank " << peer << " receives less than is sent to it";
        receiver.receive(next++, data);
      }
    }
  }
  for (Rank& rank : ranks) {
    rank.compute();
    ASSERT_TRUE(rank.finished()) << "rank " << rank.plan().rank << " is stuck";
  }
}

/// Every tile has multiplied with its rows of A, each column once, whoever had it.
void check_taken(const Case& c, const Rank& rank) {
  if (rank.plan().input_blocks.empty()) return;
  const auto rows = slice_begins(c.heads.rows, c.options.m, c.options.world_size);
  const std::int64_t first_row = rows[at(rank.plan().rank)];
  for (std::int64_t t = 0; t < rank.plan().grid.num_tiles(); ++t) {
    const Tile& tile = rank.plan().grid.tile(t);
    for (std::int64_t i = 0; i < tile.rows; ++i) {
      for (std::int64_t j = 0; j < c.options.k; ++j) {
        ASSERT_EQ(rank.taken(t)[at(i)][at(j)], Rank::whole_a(first_row + tile.row_begin + i, j))
            << "tile " << t << " row " << i << " column " << j;
      }
    }
  }
}

void check_outputs(const Case& c, const std::vector<Rank>& ranks) {
  const std::int32_t world = c.options.world_size;
  const auto begins =
      slice_begins(c.slices, c.kind == Kind::kGatherColumns ? c.options.n : c.options.m, world);
  const auto rows = slice_begins(c.heads.rows, c.options.m, world);
  const auto columns =
      slice_begins(c.heads.columns, c.kind == Kind::kFromHeads ? c.options.k : c.options.n, world);
  for (std::int32_t r = 0; r < world; ++r) {
    const OverlapPlan& plan = ranks[at(r)].plan();
    const bool scatter = c.kind == Kind::kReduceScatter;
    const bool heads = c.kind == Kind::kHeads;
    const bool from_heads = c.kind == Kind::kFromHeads;
    if (from_heads) check_taken(c, ranks[at(r)]);
    if (testing::Test::HasFatalFailure()) return;
    const std::int64_t own_rows = rows[at(r) + 1] - rows[at(r)];
    ASSERT_EQ(plan.output_rows, scatter      ? begins[at(r) + 1] - begins[at(r)]
                                : from_heads ? own_rows
                                             : c.options.m);
    ASSERT_EQ(plan.output_cols, heads ? columns[at(r) + 1] - columns[at(r)] : c.options.n);
    for (std::int64_t i = 0; i < plan.output_rows; ++i) {
      for (std::int64_t j = 0; j < plan.output_cols; ++j) {
        Tag expected = 0;
        if (scatter) {
          for (std::int32_t s = 0; s < world; ++s) expected += tag(s, begins[at(r)] + i, j);
        } else if (heads) {
          const auto source = std::ranges::upper_bound(rows, i) - rows.begin() - 1;
          expected = tag(source, i - rows[at(source)], columns[at(r)] + j);
        } else {
          expected = tag(r, i, j);
        }
        ASSERT_EQ(ranks[at(r)].output(i, j), expected) << "rank " << r << " row " << i << " column " << j;
      }
    }
  }
}

TEST_F(TailFreePlans, HoldAndMeanTheOperation) {
  for (int i = 0; i < 200; ++i) {
    const Case c = next();
    SCOPED_TRACE(c.text());
    const std::vector<OverlapPlan> plans = c.plans();
    for (const OverlapPlan& plan : plans) {
      const Verdict alone = verify(plan);
      ASSERT_TRUE(alone) << alone.reason;
      if (i % 10 == 0) {
        ASSERT_EQ(plan_from_json(to_json(plan)), plan);
      }
      ASSERT_EQ(to_text(plan).find("does not hold"), std::string::npos);
    }
    const Verdict together = verify(plans);
    ASSERT_TRUE(together) << together.reason;
    std::vector<Rank> ranks;
    const bool from_heads = c.kind == Kind::kFromHeads;
    const auto columns =
        slice_begins(c.heads.columns, from_heads ? c.options.k : c.options.n, c.options.world_size);
    for (const OverlapPlan& plan : plans) ranks.emplace_back(plan, columns[at(plan.rank)]);
    run_all(ranks);
    if (HasFatalFailure()) return;
    check_outputs(c, ranks);
    if (HasFatalFailure()) return;
  }
}

TEST_F(TailFreePlans, BaselinesHoldAndHaveTheSameTiles) {
  for (int i = 0; i < 300; ++i) {
    const Case c = next();
    SCOPED_TRACE(c.text());
    const std::int64_t num_slices = c.kind == Kind::kReduceScatter ? 1 : pick(1, 5);
    const auto plans = c.all([&](std::int32_t rank) { return c.serial_plan(rank, num_slices); });
    const Verdict together = verify(plans);
    ASSERT_TRUE(together) << together.reason;
    if (num_slices > 1 && c.kind != Kind::kHeads && c.kind != Kind::kFromHeads) continue;
    for (std::int32_t rank = 0; rank < c.options.world_size; ++rank) {
      ASSERT_EQ(plans[at(rank)].grid, c.plan(rank).grid) << "results would have other bits";
    }
  }
}

TEST_F(TailFreePlans, AllSlicesOfABaselineHaveTheirRows) {
  for (int i = 0; i < 200; ++i) {
    const std::int64_t size = pick(0, 80);
    const auto world = static_cast<std::int32_t>(pick(1, 6));
    const SliceOptions sizes = slices(size, world);
    std::vector<std::int64_t> rows = sliced_rows(sizes, size, world, pick(1, 9), pick(1, 5));
    std::ranges::sort(rows);
    std::vector<std::int64_t> all(at(size));
    std::iota(all.begin(), all.end(), 0);
    ASSERT_EQ(rows, all);
  }
}

// Each rank begins with what it has and ends with what it keeps, and no two send to the same rank in a step.
TEST_F(TailFreePlans, OrderIsTheOneThatLeavesNoTail) {
  for (std::int32_t world = 2; world <= 9; ++world) {
    Case c;
    c.options.world_size = world;
    c.options.m = world * 8;
    c.options.n = 8;
    c.options.k = 4;
    c.options.tile_m = c.options.tile_n = 4;
    for (const Kind kind : {Kind::kGatherRows, Kind::kReduceScatter}) {
      c.kind = kind;
      std::vector<std::vector<std::int32_t>> targets;
      for (const OverlapPlan& plan : c.plans()) {
        const std::int64_t edge = kind == Kind::kGatherRows ? plan.schedule.front() : plan.schedule.back();
        EXPECT_EQ(plan.grid.tile(edge).problem, plan.rank);
        auto& of_rank = targets.emplace_back();
        for (const Transfer& t : plan.transfers) {
          if (t.kind != TransferKind::kSend) continue;
          if (of_rank.empty() || of_rank.back() != t.peer) of_rank.push_back(t.peer);
        }
        EXPECT_EQ(std::ssize(of_rank), world - 1);
      }
      for (std::size_t step = 0; step + 1 < at(world); ++step) {
        std::vector<std::int32_t> loaded;
        for (const auto& of_rank : targets) loaded.push_back(of_rank[step]);
        std::ranges::sort(loaded);
        EXPECT_EQ(std::ranges::adjacent_find(loaded), loaded.end()) << "step " << step;
      }
    }
  }
}

// A slice is in one channel, those of steps that follow each other in different ones, and a rank's in as many
// as were asked for, none of them another rank's.
TEST_F(TailFreePlans, SlicesTakeTheSendChannelsInTurn) {
  for (int i = 0; i < 200; ++i) {
    Case c = next();
    PlanOptions& o = c.options;
    o.m = std::max<std::int64_t>(o.m, 1) * o.world_size;
    o.n = std::max<std::int64_t>(o.n, 1) * o.world_size;
    o.k = std::max<std::int64_t>(o.k, 1) * o.world_size;
    c.slices.sizes.clear();
    c.heads.rows.sizes.clear();
    c.heads.columns.sizes.clear();
    SCOPED_TRACE(c.text());
    const bool heads = c.kind == Kind::kHeads || c.kind == Kind::kFromHeads;
    const std::int64_t asked = heads ? c.heads.columns.send_channels : c.slices.send_channels;
    const bool computed = c.kind == Kind::kReduceScatter || c.kind == Kind::kHeads;
    const std::int64_t expected = std::min<std::int64_t>(asked > 0  ? asked
                                                         : computed ? 2
                                                                    : 1,
                                                         o.world_size - 1);
    std::map<std::int32_t, std::int32_t> owner;
    for (const OverlapPlan& plan : c.plans()) {
      std::map<std::int32_t, std::int32_t> channel_of_step;
      for (const Transfer& t : plan.transfers) {
        if (t.kind != TransferKind::kSend) continue;
        const std::int32_t step = (t.peer - plan.rank + o.world_size) % o.world_size;
        ASSERT_EQ(channel_of_step.try_emplace(step, t.channel).first->second, t.channel) << "step " << step;
        ASSERT_EQ(owner.try_emplace(t.channel, plan.rank).first->second, plan.rank);
      }
      ASSERT_EQ(std::ssize(channel_of_step), o.world_size - 1);
      std::set<std::int32_t> channels;
      for (const auto& [step, channel] : channel_of_step) {
        channels.insert(channel);
        if (step <= expected) continue;
        ASSERT_EQ(channel, channel_of_step.at(step - static_cast<std::int32_t>(expected)));
      }
      ASSERT_EQ(std::ssize(channels), expected);
    }
  }
}

TEST_F(TailFreePlans, BadOptionsSayWhatIsExpected) {
  const auto message = [](const SliceOptions& slices, std::vector<std::int64_t> partition = {}) {
    PlanOptions options{.world_size = 3,
                        .m = 12,
                        .n = 4,
                        .k = 2,
                        .tile_m = 2,
                        .tile_n = 2,
                        .resources = {},
                        .partition = std::move(partition)};
    const std::string gather = message_of(ErrorKind::kBadArgument,
                                          [&] { static_cast<void>(plan_all_gather_gemm(options, slices)); });
    EXPECT_EQ(message_of(ErrorKind::kBadArgument,
                         [&] { static_cast<void>(plan_tail_free_reduce_scatter(options, slices)); }),
              gather);
    return gather;
  };
  EXPECT_EQ(message({.sizes = {6, 6}}), "there are 2 slice sizes (6,6); expected one for each of 3 ranks");
  EXPECT_EQ(message({.sizes = {6, -1, 7}}), "slice 1 has size -1; it must be at least 0");
  EXPECT_EQ(message({.sizes = {6, 4, 1}}), "slice sizes 6,4,1 sum to 11; expected 12");
  EXPECT_EQ(message({.sizes = {}, .parts = -2}),
            "parts of a slice are -2; expected at least 1, or 0: chosen");
  EXPECT_EQ(message({.send_channels = -2}), "send_channels is -2; expected at least 1, or 0: chosen");
  EXPECT_EQ(message({}, {3, 3}),
            "partition 3,3 does not apply to tail-free plans: slices take its place; expected none");
  PlanOptions options{.m = 4, .n = 4, .k = 2, .resources = {}, .partition = {}};
  EXPECT_EQ(message_of(ErrorKind::kBadArgument,
                       [&] { static_cast<void>(plan_sliced_all_gather_gemm(options, {}, 0)); }),
            "num_slices is 0; it must be at least 1");
}

}  // namespace
}  // namespace flashoverlap::test

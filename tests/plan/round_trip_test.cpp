#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "plan/random_plans.h"
#include "support/seed.h"

/// Carries plans out on tags, independently of every executor, and compares with what the operations mean.
namespace flashoverlap::test {
namespace {

/// What one element holds: contributions as rank * 2^32 + row * 2^16 + column, added up. A sum over ranks of
/// tags of the same place is then a value that no other place and no other set of ranks can give.
using Tag = std::int64_t;
constexpr Tag kPoison = -(Tag{1} << 60U);

Tag tag(std::int64_t rank, std::int64_t row, std::int64_t col) {
  return (Tag{1} << (32 + rank)) + (row << 16) +
         col;  // One bit per rank: no subset of ranks gives the same sum.
}

struct RankMemory {
  std::vector<Tag> packed, received, output;
  std::vector<Tag>& of(BufferKind kind) {
    if (kind == BufferKind::kPacked) return packed;
    if (kind == BufferKind::kReceived) return received;
    EXPECT_EQ(kind, BufferKind::kOutput);
    return output;
  }
};

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

void compute_tiles(const OverlapPlan& plan, RankMemory& memory) {
  for (const std::int64_t t : plan.schedule) {
    const Tile& tile = plan.grid.tile(t);
    const auto segments = plan.placement.of_tile(t);
    const auto write = [&](std::int64_t row, std::vector<Tag>& buffer, std::int64_t offset) {
      for (std::int64_t c = 0; c < tile.cols; ++c) {
        ASSERT_EQ(buffer.at(at(offset + c)), kPoison) << "written twice";
        buffer[at(offset + c)] = tag(plan.rank, tile.row_begin + row, tile.col_begin + c);
      }
    };
    for (const PlacementSegment& s : segments) {
      for (std::int64_t i = 0; i < s.rows; ++i)
        write(s.row_begin + i, memory.packed, s.offset + i * tile.cols);
    }
    for (std::int64_t i = 0; segments.empty() && i < tile.rows; ++i) {
      write(i, memory.output, (tile.row_begin + i) * plan.output_cols + tile.col_begin);
    }
  }
}

void reduce(const std::vector<OverlapPlan>& plans, std::vector<RankMemory>& memory, std::size_t i) {
  const Region& region = plans[0].transfers[i].source;
  std::vector<Tag> sum(at(region.count), 0);
  for (std::size_t r = 0; r < plans.size(); ++r) {
    const Region& source = plans[r].transfers[i].source;
    for (std::size_t e = 0; e < sum.size(); ++e)
      sum[e] += memory[r].of(source.buffer).at(at(source.offset) + e);
  }
  for (std::size_t r = 0; r < plans.size(); ++r) {
    const Region& source = plans[r].transfers[i].source;
    const Region& destination = plans[r].transfers[i].destination;
    const std::size_t skip = at(destination.offset - source.offset);
    for (std::size_t e = 0; e < sum.size(); ++e) {
      // A reduce-scatter leaves the other chunks undefined.
      const bool mine = e >= skip && e < skip + at(destination.count);
      memory[r].of(source.buffer)[at(source.offset) + e] = mine ? sum[e] : kPoison;
    }
  }
}

void all_to_all(const std::vector<OverlapPlan>& plans, std::vector<RankMemory>& memory, std::size_t i) {
  for (std::size_t d = 0; d < plans.size(); ++d) {
    std::int64_t to = plans[d].transfers[i].destination.offset;
    for (std::size_t s = 0; s < plans.size(); ++s) {
      const Transfer& sent = plans[s].transfers[i];
      std::int64_t from = sent.source.offset;
      for (std::size_t before = 0; before < d; ++before) from += sent.send_counts[before];
      ASSERT_EQ(sent.send_counts[d], plans[d].transfers[i].receive_counts[s]);
      for (std::int64_t e = 0; e < sent.send_counts[d]; ++e) {
        memory[d].received.at(at(to++)) = memory[s].packed.at(at(from + e));
      }
    }
  }
}

void restore(const OverlapPlan& plan, RankMemory& memory) {
  for (const RestoreBand& band : plan.restore.bands) {
    for (const RestorePiece& piece : plan.restore.of_band(band)) {
      for (std::int64_t i = 0; i < band.rows; ++i) {
        for (std::int64_t j = 0; j < piece.cols; ++j) {
          Tag& to = memory.output.at(at((band.row_begin + i) * plan.output_cols + piece.col_begin + j));
          ASSERT_EQ(to, kPoison) << "restored twice";
          to = memory.of(plan.restore.source).at(at(piece.offset + i * piece.cols + j));
        }
      }
    }
  }
}

std::vector<RankMemory> carry_out(const std::vector<OverlapPlan>& plans) {
  std::vector<RankMemory> memory;
  for (const OverlapPlan& plan : plans) {
    memory.push_back({std::vector<Tag>(at(plan.packed_size), kPoison),
                      std::vector<Tag>(at(plan.received_size), kPoison),
                      std::vector<Tag>(at(plan.output_rows * plan.output_cols), kPoison)});
    compute_tiles(plan, memory.back());
  }
  for (std::size_t i = 0; i < plans[0].transfers.size(); ++i) {
    if (plans[0].transfers[i].kind == TransferKind::kAllToAll) {
      all_to_all(plans, memory, i);
    } else {
      reduce(plans, memory, i);
    }
  }
  for (std::size_t r = 0; r < plans.size(); ++r) restore(plans[r], memory[r]);
  return memory;
}

/// The definition of each operation.
std::vector<Tag> expected(const PlanCase& c, std::int32_t rank) {
  std::vector<Tag> out;
  const PlanOptions& o = c.options;
  if (c.operation == PlanCase::Operation::kAllToAll) {
    for (std::size_t source = 0; source < c.routing.destinations.size(); ++source) {
      for (std::size_t row = 0; row < c.routing.destinations[source].size(); ++row) {
        if (c.routing.destinations[source][row] != rank) continue;
        for (std::int64_t col = 0; col < o.n; ++col) {
          out.push_back(tag(static_cast<std::int64_t>(source), static_cast<std::int64_t>(row), col));
        }
      }
    }
    return out;
  }
  for (std::int64_t row = 0; row < o.m; ++row) {
    bool mine = true;
    if (c.operation == PlanCase::Operation::kContiguous) {
      mine = row >= rank * o.m / o.world_size && row < (rank + 1) * o.m / o.world_size;
    } else if (c.operation == PlanCase::Operation::kBlockCyclic) {
      const std::int64_t height = std::min(o.tile_m, o.m - row / o.tile_m * o.tile_m);
      const std::int64_t in_tile = row % o.tile_m;
      mine = in_tile >= rank * height / o.world_size && in_tile < (rank + 1) * height / o.world_size;
    }
    for (std::int64_t col = 0; mine && col < o.n; ++col) {
      Tag sum = 0;
      for (std::int64_t r = 0; r < o.world_size; ++r) sum += tag(r, row, col);
      out.push_back(sum);
    }
  }
  return out;
}

class RoundTripTest : public SeededTest {};

TEST_F(RoundTripTest, EveryPlanVerifiesAndGivesWhatItsOperationMeans) {
  RandomPlans random(rng_);
  std::set<std::size_t> numbers_of_groups;
  for (int i = 0; i < 1500; ++i) {
    const PlanCase c = random.next();
    SCOPED_TRACE(c.text());
    const std::vector<OverlapPlan> plans = c.plans();
    for (const OverlapPlan& plan : plans) {
      ASSERT_EQ(verify(plan).reason, "") << "rank " << plan.rank;
      ASSERT_EQ(plan.agreement, plans[0].agreement);
      ASSERT_EQ(plan.groups.size(), plans[0].groups.size());
    }
    ASSERT_EQ(verify(std::span<const OverlapPlan>(plans)).reason, "");
    const std::vector<RankMemory> memory = carry_out(plans);
    ASSERT_FALSE(HasFatalFailure());
    for (std::int32_t r = 0; r < c.options.world_size; ++r) {
      ASSERT_EQ(memory[at(r)].output, expected(c, r)) << "rank " << r;
    }
    numbers_of_groups.insert(plans[0].groups.size());
  }
  EXPECT_GT(numbers_of_groups.size(), 8U) << "the cases are too much alike";
}

TEST_F(RoundTripTest, OwnedRowsAreWhatTheOutputHolds) {
  RandomPlans random(rng_);
  for (int i = 0; i < 300; ++i) {
    const PlanCase c = random.next();
    if (c.operation != PlanCase::Operation::kContiguous && c.operation != PlanCase::Operation::kBlockCyclic)
      continue;
    SCOPED_TRACE(c.text());
    std::vector<std::int64_t> all;
    for (std::int32_t r = 0; r < c.options.world_size; ++r) {
      const auto rows = owned_rows(c.options.m, c.options.tile_m, c.options.world_size, r, c.ownership());
      ASSERT_EQ(std::ssize(rows), c.plan(r).output_rows);
      ASSERT_TRUE(std::ranges::is_sorted(rows));
      const std::vector<Tag> out = expected(c, r);
      for (std::size_t row = 0; c.options.n > 0 && row < rows.size(); ++row) {
        ASSERT_EQ((out[row * at(c.options.n)] & 0xffffffff) >> 16, c.options.world_size * rows[row]);
      }
      all.insert(all.end(), rows.begin(), rows.end());
    }
    std::ranges::sort(all);
    for (std::size_t row = 0; row < all.size(); ++row) ASSERT_EQ(all[row], static_cast<std::int64_t>(row));
    ASSERT_EQ(std::ssize(all), c.options.m);
  }
}

}  // namespace
}  // namespace flashoverlap::test

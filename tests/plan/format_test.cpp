#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "plan/hand_made.h"
#include "plan/random_plans.h"
#include "support/seed.h"

namespace flashoverlap::test {
namespace {

OverlapPlan small_plan() {
  PlanOptions o;
  o.world_size = 2;
  o.m = 8;
  o.n = 6;
  o.k = 4;
  o.tile_m = 4;
  o.tile_n = 4;
  o.partition = {1, 2, 1};
  return plan_all_reduce(o);
}

std::string error_of(const std::string& json) {
  try {
    (void)plan_from_json(json);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadArgument);
    return error.what();
  }
  return "no error";
}

/// The error for the small plan's JSON after a change.
template <typename Change>
std::string error_after(const Change& change) {
  nlohmann::json json = nlohmann::json::parse(to_json(small_plan()));
  change(json);
  return error_of(json.dump());
}

class FormatTest : public SeededTest {};

TEST_F(FormatTest, JsonRoundTripIsExact) {
  RandomPlans random(rng_);
  for (int i = 0; i < 200; ++i) {
    const PlanCase c = random.next();
    SCOPED_TRACE(c.text());
    const OverlapPlan plan = c.plan(static_cast<std::int32_t>(pick(0, c.options.world_size - 1)));
    const std::string json = to_json(plan);
    ASSERT_EQ(plan_from_json(json), plan);
    ASSERT_EQ(to_json(plan_from_json(json)), json);
  }
  for (const auto& plans : {all_gather_gemm(), tail_free_reduce_scatter(), put_to_owners()}) {
    for (const OverlapPlan& plan : plans) EXPECT_EQ(plan_from_json(to_json(plan)), plan) << plan.operation;
  }
}

TEST_F(FormatTest, DamagedJsonNamesTheField) {
  EXPECT_EQ(error_after([](auto&) {}), "no error");
  EXPECT_EQ(error_of("[]"), "plan is of type array; expected an object");
  EXPECT_EQ(error_of("").rfind("plan: not JSON: ", 0), 0U);
  EXPECT_EQ(error_after([](auto& j) { j.erase("rank"); }), "plan.rank is missing");
  EXPECT_EQ(error_after([](auto& j) { j["format"] = 1; }), "plan.format is 1; expected 2");
  EXPECT_EQ(error_after([](auto& j) { j["rank"] = "0"; }),
            "plan.rank is of type string; expected an integer");
  EXPECT_EQ(error_after([](auto& j) { j["rank"] = 0.5; }),
            "plan.rank is of type number; expected an integer");
  EXPECT_EQ(error_after([](auto& j) { j["rank"] = std::int64_t{1} << 32; }),
            "plan.rank is 4294967296; expected a number that fits in 32 bits");
  EXPECT_EQ(error_after([](auto& j) { j["packed_size"] = std::uint64_t{1} << 63; }),
            "plan.packed_size is 9223372036854775808; expected a number below 2^63");
  EXPECT_EQ(error_after([](auto& j) { j["transfers"][2]["source"].erase("count"); }),
            "plan.transfers[2].source.count is missing");
  EXPECT_EQ(error_after([](auto& j) { j["transfers"][1]["kind"] = "all-gathr"; }),
            "plan.transfers[1].kind is \"all-gathr\"; expected all-reduce, reduce-scatter, all-gather, "
            "all-to-all, send, "
            "receive, put");
  EXPECT_EQ(error_after([](auto& j) { j["transfers"][1]["trigger"]["kind"] = 3; }),
            "plan.transfers[1].trigger.kind is of type number; expected a string");
  EXPECT_EQ(error_after([](auto& j) { j["restore"]["pieces"][1].push_back(4); }),
            "plan.restore.pieces[1] is of type array; expected an array of 3 integers");
  EXPECT_EQ(error_after([](auto& j) { j["placement"]["segments"][0][2] = nullptr; }),
            "plan.placement.segments[0][2] is of type null; expected an integer");
  EXPECT_EQ(error_after([](auto& j) { j["schedule"][3] = false; }),
            "plan.schedule[3] is of type boolean; expected an integer");
  EXPECT_EQ(error_after([](auto& j) { j["dtype"] = "f64"; }),
            "plan.dtype: type 'f64' is not known; accepted: f32, bf16, f16");
  EXPECT_EQ(error_after([](auto& j) { j["agreement"] = "xyz"; }),
            "plan.agreement is \"xyz\"; expected 16 hexadecimal digits");
  EXPECT_EQ(error_after([](auto& j) { j["grid"]["tile_m"] = 0; }),
            "plan.grid: tile_m must be at least 1, got 0");
  EXPECT_EQ(error_after([](auto& j) { j["grid"]["tile_m"] = 1; }),
            "plan.grid: its sizes make 16 tiles, but plan.schedule has 4");
  EXPECT_EQ(error_after([](auto& j) { j["groups"][0]["num_tiles"] = 2; }),
            "plan: fields are in conflict: group 1 begins at position 1, but the groups before it end at "
            "position 2");
}

TEST_F(FormatTest, NoBytesCrashTheReader) {
  const std::string json = to_json(small_plan());
  int refused = 0;
  const auto try_one = [&](const std::string& damaged) {
    try {
      const OverlapPlan plan = plan_from_json(damaged);
      ASSERT_EQ(verify(plan).reason, "") << damaged;
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kBadArgument);
      ++refused;
    }
  };
  for (std::size_t length = 0; length < json.size(); length += 7) try_one(json.substr(0, length));
  for (int i = 0; i < 3000; ++i) {
    std::string damaged = json;
    for (std::int64_t changes = pick(1, 3); changes > 0; --changes) {
      char& byte = damaged[static_cast<std::size_t>(pick(0, std::ssize(damaged) - 1))];
      byte = pick(0, 1) == 0 ? static_cast<char>(pick(-128, 127)) : "0123456789-[]{},\""[pick(0, 16)];
    }
    try_one(damaged);
  }
  EXPECT_GT(refused, 2000);
}

TEST_F(FormatTest, TextShowsMapGroupsAndTransfers) {
  const std::string text = to_text(small_plan());
  const auto has = [&](const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  };
  has("gemm-all-reduce plan of rank 0 of 2\n");
  has("product    8 x 6 x 4 (m x n x k), f32\n");
  has("tiles      4 of 4 x 4 in 1 problem\n");
  has("waves      4 of 1 compute unit\n");
  has("partition  1,2,1\n");
  has("  row        0  0a 1b\n  row        4  2b 3c\n");
  has("    1 b          2            1          2             24  1\n");
  has("       1        0  all-reduce after group 1; packed[16, 40) -> packed[16, 40)\n");
  has("restore: 2 bands of rows in 4 pieces, from the packed buffer\n");
}

TEST_F(FormatTest, TextOfALargePlanIsElided) {
  PlanOptions o;
  o.world_size = 2;
  o.m = 10000;
  o.n = 10000;
  o.tile_m = 100;
  o.tile_n = 100;
  o.partition = std::vector<std::int64_t>(10000, 1);
  const std::string text = to_text(plan_all_reduce(o));
  EXPECT_NE(text.find("... 32 of 100 tile rows and 16 of 100 tile columns shown\n"), std::string::npos);
  EXPECT_NE(text.find("  ... 9968 more\n"), std::string::npos);
  EXPECT_LT(std::ranges::count(text, '\n'), 150);
}

TEST_F(FormatTest, TextOfAPlanThatDoesNotHoldSaysWhy) {
  OverlapPlan plan = small_plan();
  plan.resources.compute_units = 0;
  EXPECT_EQ(to_text(plan),
            "gemm-all-reduce plan of rank 0 of 2\nthis plan does not hold: compute_units must be at least 1, "
            "got 0\n");
}

TEST_F(FormatTest, TextOfEveryPlanCanBePrinted) {
  RandomPlans random(rng_);
  for (int i = 0; i < 100; ++i) {
    const PlanCase c = random.next();
    SCOPED_TRACE(c.text());
    ASSERT_NE(to_text(c.plan(0)).find("restore: "), std::string::npos);
  }
  for (const auto& plans : {all_gather_gemm(), tail_free_reduce_scatter(), put_to_owners()}) {
    EXPECT_NE(to_text(plans[0]).find("slices "), std::string::npos);
  }
}

}  // namespace
}  // namespace flashoverlap::test

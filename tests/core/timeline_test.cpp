#include "flashoverlap/timeline.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/seed.h"

namespace flashoverlap {
namespace {

using Json = nlohmann::json;

Json trace_of(const Timeline& timeline) {
  std::ostringstream out;
  write_chrome_trace(timeline, out);
  return Json::parse(out.str());
}

Timeline two_ranks() {
  return {{{1, "stream 0", "all-reduce of group 0", SpanKind::kCommunication, 1050, 1090},
           {0, "compute 10", "tile 1", SpanKind::kCompute, 1000, 1050},
           {0, "compute 2", "tile 0", SpanKind::kCompute, 1000, 1100},
           {0, "compute 2", "restore", SpanKind::kEpilogue, 1100, 1200}}};
}

TEST(Timeline, TraceHoldsEverySpanOnItsTrack) {
  const Json events = trace_of(two_ranks()).at("traceEvents");
  std::map<std::pair<int, int>, std::string> tracks;
  for (const Json& event : events) {
    if (event.at("name") == "thread_name")
      tracks[{event.at("pid"), event.at("tid")}] = event.at("args").at("name");
  }
  EXPECT_EQ(tracks.size(), 3U);

  std::vector<std::string> seen;
  for (const Json& event : events) {
    if (event.at("ph") != "X") continue;
    seen.push_back(tracks.at({event.at("pid"), event.at("tid")}) + ": " + std::string(event.at("name")) +
                   " " + std::string(event.at("cat")) + " " + event.at("ts").dump() + " " +
                   event.at("dur").dump());
  }
  const std::vector<std::string> expected{
      "compute 2: tile 0 compute 0.0 100.0", "compute 2: restore epilogue 100.0 100.0",
      "compute 10: tile 1 compute 0.0 50.0", "stream 0: all-reduce of group 0 communication 50.0 40.0"};
  EXPECT_EQ(seen, expected);
}

TEST(Timeline, TraceNamesRanksInOrder) {
  const Json events = trace_of(two_ranks()).at("traceEvents");
  std::vector<std::string> names;
  for (const Json& event : events) {
    if (event.at("name") == "process_name") names.push_back(event.at("args").at("name"));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"rank 0", "rank 1"}));
}

TEST(Timeline, TraceOfNothingIsValid) {
  EXPECT_TRUE(trace_of({}).at("traceEvents").empty());
}

TEST(Timeline, TraceSurvivesAnyText) {
  const std::string name = "quote \" backslash \\ newline \n not utf-8 \xFF\xC0";
  const Json events = trace_of({{{0, name, name, SpanKind::kWait, 0, 1}}}).at("traceEvents");
  EXPECT_EQ(events.size(), 5U);
  EXPECT_EQ(std::string(events.back().at("name")).substr(0, 7), "quote \"");
}

TEST(Timeline, SpansThatCannotBeDrawnAreLeftOut) {
  const double nan = std::nan("");
  const double infinity = std::numeric_limits<double>::infinity();
  const Timeline timeline{{{0, "t", "nan", SpanKind::kWait, nan, 1},
                           {0, "t", "infinite", SpanKind::kWait, 0, infinity},
                           {0, "t", "backwards", SpanKind::kWait, 2, 1},
                           {0, "t", "good", SpanKind::kWait, 1, 2}}};
  EXPECT_EQ(trace_of(timeline).at("traceEvents").size(), 5U);
  EXPECT_EQ(to_text(timeline, 20), "rank 0 t |..........|\n          0   1.0 us\n");
}

TEST(Timeline, PictureShowsWhatRanWhere) {
  EXPECT_EQ(to_text(two_ranks(), 40),
            "rank 0 compute 2  |##########eeeeeeeeee|\n"
            "rank 0 compute 10 |#####               |\n"
            "rank 1 stream 0   |     ====           |\n"
            "                   0           200.0 us\n");
}

TEST(Timeline, PictureKeepsShortSpans) {
  const Timeline timeline{{{0, "a", "long", SpanKind::kCompute, 0, 1000},
                           {0, "b", "short", SpanKind::kCommunication, 500.5, 500.6},
                           {0, "b", "instant", SpanKind::kWait, 900, 900}}};
  EXPECT_EQ(to_text(timeline, 20),
            "rank 0 a |##########|\n"
            "rank 0 b |     =   .|\n"
            "          0  1.00 ms\n");
}

TEST(Timeline, PictureOfNothing) {
  EXPECT_EQ(to_text(Timeline{}, 80), "(nothing ran)\n");
  EXPECT_EQ(to_text({{{0, "a", "instant", SpanKind::kCompute, 5, 5}}}, 20),
            "rank 0 a |#         |\n          0   0.0 us\n");
}

using TimelineProperty = test::SeededTest;

TEST_F(TimelineProperty, EveryLineFitsAndEveryTrackHasOne) {
  for (int round = 0; round < 300; ++round) {
    Timeline timeline;
    std::set<std::pair<int, std::string>> tracks;
    for (std::int64_t i = pick(1, 40); i > 0; --i) {
      const double begin_us = static_cast<double>(pick(-1'000'000, 1'000'000)) / 7;
      const double end_us = begin_us + static_cast<double>(pick(0, 10'000)) / 3;
      const auto rank = static_cast<std::int32_t>(pick(0, 12));
      const std::string track = "stream " + std::to_string(pick(0, 12));
      timeline.spans.push_back({rank, track, "x", static_cast<SpanKind>(pick(0, 3)), begin_us, end_us});
      tracks.insert({rank, track});
    }
    const int width = static_cast<int>(pick(40, 200));
    std::istringstream lines(to_text(timeline, width));
    std::size_t count = 0;
    for (std::string line; std::getline(lines, line); ++count) {
      EXPECT_LE(line.size(), static_cast<std::size_t>(width)) << line;
      // Each track's line shows at least one span.
      const bool shows_a_span = line.find_first_of("#=.e", line.find('|')) != std::string::npos;
      EXPECT_TRUE(shows_a_span || count >= tracks.size()) << line;
    }
    EXPECT_EQ(count, tracks.size() + 1);
  }
}

}  // namespace
}  // namespace flashoverlap

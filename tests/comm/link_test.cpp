#include "comm/link.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

namespace flashoverlap::comm {
namespace {

using std::chrono::microseconds;
using Calls = std::vector<std::shared_ptr<const Call>>;

// 1 GB/s: a microsecond for 1000 bytes.
constexpr LinkModel kLink{1.0, 5.0};

TimePoint at(std::int64_t us) {
  return TimePoint{microseconds{us}};
}

std::int64_t us(TimePoint time) {
  return std::chrono::round<microseconds>(time.time_since_epoch()).count();
}

Calls same_call(std::size_t world_size, const Call& call) {
  return Calls(world_size, std::make_shared<const Call>(call));
}

Call call_of(CallKind kind, std::vector<std::int64_t> send_counts,
             std::vector<std::int64_t> receive_counts = {}) {
  Call call;
  call.kind = kind;
  call.send_counts = std::move(send_counts);
  call.receive_counts = std::move(receive_counts);
  return call;
}

std::vector<std::int64_t> book_us(const LinkModel& model, std::vector<Link>& links, std::int64_t ready,
                                  const Calls& calls) {
  std::vector<Link*> pointers;
  for (Link& link : links) pointers.push_back(&link);
  std::vector<std::int64_t> completions;
  for (const TimePoint time : book(model, pointers, at(ready), calls)) completions.push_back(us(time));
  return completions;
}

TEST(BytesOnWireTest, FollowTheDocumentedFormulas) {
  const auto reduce = bytes_on_wire(same_call(4, call_of(CallKind::kAllReduce, {1000})));
  ASSERT_EQ(reduce.size(), 4U);
  EXPECT_DOUBLE_EQ(reduce[3].transmit, 2 * 0.75 * 4000);
  EXPECT_DOUBLE_EQ(reduce[3].receive, 2 * 0.75 * 4000);
  const auto scatter = bytes_on_wire(same_call(4, call_of(CallKind::kReduceScatter, {100, 200, 300, 400})));
  EXPECT_DOUBLE_EQ(scatter[0].transmit, 0.75 * 4000);
  const auto gather = bytes_on_wire(same_call(2, call_of(CallKind::kAllGather, {}, {600, 400})));
  EXPECT_DOUBLE_EQ(gather[1].transmit, 0.5 * 4000);
  EXPECT_DOUBLE_EQ(bytes_on_wire(same_call(1, call_of(CallKind::kAllReduce, {1000})))[0].transmit, 0);
  EXPECT_DOUBLE_EQ(bytes_on_wire(same_call(3, call_of(CallKind::kBarrier, {})))[2].receive, 0);
  const auto pair = bytes_on_wire({std::make_shared<const Call>(call_of(CallKind::kSend, {25})),
                                   std::make_shared<const Call>(call_of(CallKind::kReceive, {}, {25}))});
  EXPECT_DOUBLE_EQ(pair[0].transmit, 100);
  EXPECT_DOUBLE_EQ(pair[0].receive, 0);
  EXPECT_DOUBLE_EQ(pair[1].transmit, 0);
  EXPECT_DOUBLE_EQ(pair[1].receive, 100);
}

TEST(BytesOnWireTest, OnesOwnChunkDoesNotTravel) {
  const auto bytes =
      bytes_on_wire({std::make_shared<const Call>(call_of(CallKind::kAllToAll, {10, 3}, {10, 7})),
                     std::make_shared<const Call>(call_of(CallKind::kAllToAll, {7, 50}, {3, 50}))});
  EXPECT_DOUBLE_EQ(bytes[0].transmit, 12);
  EXPECT_DOUBLE_EQ(bytes[0].receive, 28);
  EXPECT_DOUBLE_EQ(bytes[1].transmit, 28);
  EXPECT_DOUBLE_EQ(bytes[1].receive, 12);
}

TEST(LinkTest, CallsQueueInEachDirection) {
  Link link;
  const auto first = link.occupy(kLink, at(100), {2000, 0});
  EXPECT_EQ(us(first.transmit), 102);
  EXPECT_EQ(us(first.receive), 100);
  const auto second = link.occupy(kLink, at(101), {1000, 4000});
  EXPECT_EQ(us(second.transmit), 103);  // Behind the first.
  EXPECT_EQ(us(second.receive), 105);   // The other direction was free.
  const auto nothing = link.occupy(kLink, at(101), {0, 0});
  EXPECT_EQ(us(nothing.transmit), 101);
  const auto later = link.occupy(kLink, at(200), {1000, 1000});
  EXPECT_EQ(us(later.transmit), 201);
}

TEST(LinkTest, WithoutBandwidthOnlyLatency) {
  std::vector<Link> links(2);
  const Calls calls = same_call(2, call_of(CallKind::kAllReduce, {1'000'000}));
  EXPECT_EQ(book_us({0, 7}, links, 10, calls), (std::vector<std::int64_t>{17, 17}));
  EXPECT_EQ(book_us({0, 7}, links, 10, calls), (std::vector<std::int64_t>{17, 17}));
}

TEST(BookTest, ACollectiveEndsWithItsSlowestLinkPlusLatency) {
  std::vector<Link> links(2);
  (void)links[1].occupy(kLink, at(0), {50'000, 0});
  const Calls calls = same_call(2, call_of(CallKind::kAllReduce, {1000}));  // 4000 bytes on each link.
  EXPECT_EQ(book_us(kLink, links, 10, calls), (std::vector<std::int64_t>{59, 59}));
  EXPECT_EQ(book_us(kLink, links, 20, same_call(2, call_of(CallKind::kBarrier, {}))),
            (std::vector<std::int64_t>{25, 25}));
}

TEST(BookTest, AnAllToAllRankWaitsOnlyForItsPartners) {
  std::vector<Link> links(3);
  const Calls calls{std::make_shared<const Call>(call_of(CallKind::kAllToAll, {0, 5000, 0}, {0, 0, 0})),
                    std::make_shared<const Call>(call_of(CallKind::kAllToAll, {0, 0, 0}, {5000, 0, 0})),
                    std::make_shared<const Call>(call_of(CallKind::kAllToAll, {0, 0, 9000}, {0, 0, 9000}))};
  EXPECT_EQ(book_us(kLink, links, 100, calls), (std::vector<std::int64_t>{125, 125, 105}));
  (void)links[0].occupy(kLink, at(120), {80'000, 0});  // Until 200: the receiver waits for its sender.
  EXPECT_EQ(book_us(kLink, links, 130, calls), (std::vector<std::int64_t>{225, 225, 135}));
}

TEST(BookTest, ExtremeLinksStayFinite) {
  std::vector<Link> links(2);
  const Calls calls = same_call(2, call_of(CallKind::kAllReduce, {1'000'000}));
  const LinkModel slow{1e-300, 1e300};
  std::int64_t last = 0;
  for (int i = 0; i < 10; ++i) {
    const std::int64_t now = book_us(slow, links, 0, calls)[0];
    EXPECT_GT(now, last);
    last = now;
  }
}

}  // namespace
}  // namespace flashoverlap::comm

#include "flashoverlap/host_stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "comm/ranks.h"

namespace flashoverlap::test {
namespace {

TEST(HostStreamTest, RunsTasksInOrder) {
  HostStream stream("a name that is longer than fifteen characters");
  std::vector<int> order;
  for (int i = 0; i < 5000; ++i) stream.enqueue([&order, i] { order.push_back(i); });
  stream.synchronize();
  ASSERT_EQ(order.size(), 5000U);
  for (int i = 0; i < 5000; ++i) ASSERT_EQ(order[static_cast<std::size_t>(i)], i);
  stream.synchronize();
}

TEST(HostStreamTest, TasksMayEnqueueTasks) {
  HostStream stream("stream");
  std::atomic<int> done = 0;
  stream.enqueue([&] {
    ++done;
    stream.enqueue([&] { ++done; });
  });
  stream.synchronize();
  EXPECT_EQ(done, 2);
}

TEST(HostStreamTest, AfterAnErrorTheRestIsDroppedThenItGoesOn) {
  for (int round = 0; round < 50; ++round) {
    HostStream stream("stream");
    std::promise<void> go;
    std::atomic<int> later = 0;
    stream.enqueue([future = go.get_future().share()] { future.wait(); });
    stream.enqueue([] { throw std::runtime_error("first"); });
    for (int i = 0; i < 10; ++i) stream.enqueue([&] { ++later; });
    stream.enqueue([] { throw std::runtime_error("second"); });
    go.set_value();
    try {
      stream.synchronize();
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "first");
    }
    EXPECT_EQ(later, 0);
    EXPECT_NO_THROW(stream.synchronize());
    stream.enqueue([&] { ++later; });
    stream.synchronize();
    EXPECT_EQ(later, 1);
  }
}

TEST(HostStreamTest, TasksBehindAPendingErrorAreDropped) {
  HostStream stream("stream");
  const auto dropped = std::make_shared<int>(0);
  stream.enqueue([] { throw std::runtime_error("boom"); });
  stream.enqueue([] { FAIL() << "must not run"; });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  stream.enqueue([dropped] { FAIL() << "must not run"; });
  EXPECT_THROW(stream.synchronize(), std::runtime_error);
  EXPECT_EQ(dropped.use_count(), 1);
}

TEST(HostStreamTest, ReleasesWhatTasksHoldBeforeSynchronizeReturns) {
  HostStream stream("stream");
  for (int round = 0; round < 500; ++round) {
    const auto held = std::make_shared<int>(round);
    stream.enqueue([held] {});
    stream.synchronize();
    ASSERT_EQ(held.use_count(), 1);
  }
}

TEST(HostStreamTest, DestructorWaitsForTheTaskInFlightAndDropsTheRest) {
  std::atomic<int> done = 0;
  {
    HostStream stream("stream");
    std::promise<void> started;
    stream.enqueue([&] {
      started.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      ++done;
    });
    for (int i = 0; i < 100; ++i)
      stream.enqueue([&] { std::this_thread::sleep_for(std::chrono::seconds(10)); });
    started.get_future().wait();
  }
  EXPECT_EQ(done, 1);
}

TEST(HostStreamTest, TellsWhenAnExceptionDestroysIt) {
  int told = 0;
  {
    const HostStream stream("stream", [&] { ++told; });
  }
  EXPECT_EQ(told, 0);
  try {
    const HostStream stream("stream", [&] { ++told; });
    throw std::runtime_error("boom");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(told, 1);
}

TEST(HostStreamTest, RefusesWhatCannotWork) {
  HostStream stream("mine");
  expect_error(thrown_by([&] { stream.enqueue({}); }), ErrorKind::kBadArgument, {"mine", "empty function"});
  stream.enqueue([&] { stream.synchronize(); });
  expect_error(thrown_by([&] { stream.synchronize(); }), ErrorKind::kBadArgument,
               {"mine", "one of its own tasks"});
}

}  // namespace
}  // namespace flashoverlap::test

#include "flashoverlap/symmetric_heap.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "comm/ranks.h"
#include "flashoverlap/in_process.h"

namespace flashoverlap::test {
namespace {

/// Memory of one rank, with what has come into it.
struct RankMemory {
  std::vector<std::int64_t> values;
  std::atomic<std::int64_t> slices{0};  ///< Sum of the slices' numbers.

  SymmetricHeap::Window window(std::vector<std::int64_t> arrivals_from) {
    SymmetricHeap::Window window;
    window.buffers = {{reinterpret_cast<std::byte*>(values.data()), std::ssize(values) * 8}};
    window.arrivals_from = std::move(arrivals_from);
    window.on_arrival = [this](std::int64_t slice) { slices += slice; };
    return window;
  }
};

TEST(SymmetricHeap, EveryRankPutsIntoEveryOther) {
  constexpr int kRanks = 4;
  constexpr int kRounds = 50;
  run_ranks(kRanks, {}, [](const CommunicatorPointer& communicator) {
    SymmetricHeap& heap = *communicator->symmetric_heap();
    const auto puts = communicator->make_stream("puts");
    const auto arrivals = communicator->make_stream("arrivals");
    const int rank = communicator->rank();
    RankMemory memory{std::vector<std::int64_t>(kRanks, -1)};
    std::vector<std::int64_t> sent(kRanks);
    for (int round = 0; round < kRounds; ++round) {  // no barrier in between
      memory.slices = 0;
      heap.open(memory.window(std::vector<std::int64_t>(kRanks, 1)));
      for (int peer = 0; peer < kRanks; ++peer) {
        std::int64_t& value = sent[static_cast<std::size_t>(peer)] = 1000 * round + 10 * rank + peer;
        heap.put(peer, 0, 8 * rank, &value, 8, rank, *puts, {.operation = "test"});
      }
      heap.await_arrivals(*arrivals, {.operation = "test"});
      arrivals->synchronize();
      puts->synchronize();
      heap.close();
      for (int source = 0; source < kRanks; ++source) {
        EXPECT_EQ(memory.values[static_cast<std::size_t>(source)], 1000 * round + 10 * source + rank);
      }
      EXPECT_EQ(memory.slices, 0 + 1 + 2 + 3);
    }
  });
}

TEST(SymmetricHeap, APacedPutTakesItsTime) {
  InProcessOptions options;
  options.link = {.bandwidth_gbps = 0, .latency_us = 20'000};
  run_ranks(2, options, [](const CommunicatorPointer& communicator) {
    SymmetricHeap& heap = *communicator->symmetric_heap();
    const auto stream = communicator->make_stream("puts");
    RankMemory memory{std::vector<std::int64_t>(1, 0)};
    const std::int64_t value = 7;
    const auto begin = std::chrono::steady_clock::now();
    const bool receives = communicator->rank() == 1;
    heap.open(memory.window({receives ? 1 : 0, 0}));
    if (!receives) heap.put(1, 0, 0, &value, 8, 0, *stream, {});
    heap.await_arrivals(*stream, {});
    stream->synchronize();
    heap.close();
    if (!receives) return;
    EXPECT_EQ(memory.values[0], 7);
    EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(20))
        << "before its latency";
  });
}

TEST(SymmetricHeap, APutOutsideTheWindowIsEveryRanksError) {
  const auto thrown = thrown_by_ranks(2, {}, [](const CommunicatorPointer& communicator) {
    SymmetricHeap& heap = *communicator->symmetric_heap();
    const auto stream = communicator->make_stream("puts");
    RankMemory memory{std::vector<std::int64_t>(1, 0)};
    const std::int64_t value = 7;
    heap.open(memory.window({1, 0}));
    if (communicator->rank() == 0) heap.put(1, 0, 4, &value, 8, 0, *stream, {});
    try {
      heap.await_arrivals(*stream, {});
      stream->synchronize();
    } catch (const Error& error) {
      communicator->abort(error.what());
      heap.close();
      throw;
    }
    heap.close();
  });
  expect_error(thrown[0], ErrorKind::kBadArgument,
               {"rank 0 puts 8 bytes at byte 4 of buffer 0 of rank 1, where 8 bytes are open"});
  expect_error(thrown[1], ErrorKind::kCommunication, {"rank 0 aborted", "where 8 bytes are open"});
  EXPECT_TRUE(thrown[1].has_value());
}

TEST(SymmetricHeap, WhoDoesNotOpenOrPutIsNamedAfterTheTimeOut) {
  InProcessOptions options;
  options.timeout = std::chrono::milliseconds(100);
  for (const bool opens : {false, true}) {
    const auto thrown = thrown_by_ranks(2, options, [&](const CommunicatorPointer& communicator) {
      SymmetricHeap& heap = *communicator->symmetric_heap();
      const auto stream = communicator->make_stream("puts");
      RankMemory memory{std::vector<std::int64_t>(1, 0)};
      const std::int64_t value = 7;
      struct Close {
        SymmetricHeap& heap;
        ~Close() { heap.close(); }
      } const close{heap};
      if (communicator->rank() == 1) {
        communicator->set_timeout(std::chrono::seconds(20));  // rank 0 is to be the first to run out of time
        if (opens) heap.open(memory.window({1, 0}));
        communicator->exchange(std::uint64_t{0}, {.operation = "the end"});
        return;
      }
      heap.open(memory.window({0, opens ? 3 : 0}));
      if (!opens) heap.put(1, 0, 0, &value, 8, 0, *stream, {.operation = "test"});
      if (opens) heap.await_arrivals(*stream, {.operation = "test"});
      stream->synchronize();
    });
    if (opens) {
      expect_error(thrown[0], ErrorKind::kTimeout,
                   {"rank 0: time-out after", "wait for puts (test)", "rank 1 owes 3 puts"});
    } else {
      expect_error(
          thrown[0], ErrorKind::kTimeout,
          {"rank 0: time-out after", "put of 8 bytes to rank 1 (test)", "rank 1 did not open its memory"});
    }
    EXPECT_TRUE(thrown[1].has_value()) << "the other rank must fail too";
  }
}

TEST(SymmetricHeap, WhoLeavesIsNamedAtOnce) {
  bool failed = false;
  try {
    run_ranks(2, {}, [](const CommunicatorPointer& communicator) {
      if (communicator->rank() == 1) return;
      SymmetricHeap& heap = *communicator->symmetric_heap();
      const auto stream = communicator->make_stream("puts");
      RankMemory memory{std::vector<std::int64_t>(1, 0)};
      heap.open(memory.window({0, 1}));
      struct Close {
        SymmetricHeap& heap;
        ~Close() { heap.close(); }
      } const close{heap};
      heap.await_arrivals(*stream, {.operation = "test"});
      stream->synchronize();
    });
  } catch (const Error& error) {
    failed = true;
    EXPECT_NE(std::string(error.what()).find("rank 1 owes 1 puts; it has finished"), std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(failed);
}

TEST(SymmetricHeap, Arguments) {
  const auto communicator = make_in_process_communicators(1)[0];
  SymmetricHeap& heap = *communicator->symmetric_heap();
  const auto stream = communicator->make_stream("puts");
  RankMemory memory{std::vector<std::int64_t>(1, 0)};
  const std::int64_t value = 7;
  expect_error(thrown_by([&] { heap.put(0, 0, 0, &value, 8, 0, *stream, {}); }), ErrorKind::kBadArgument,
               {"put without a window open"});
  expect_error(thrown_by([&] { heap.open(memory.window({})); }), ErrorKind::kBadArgument,
               {"a window with arrivals from 0 ranks; one number for each of 1 ranks"});
  heap.open(memory.window({0}));
  expect_error(thrown_by([&] { heap.open(memory.window({0})); }), ErrorKind::kBadArgument,
               {"is open already"});
  expect_error(thrown_by([&] { heap.put(1, 0, 0, &value, 8, 0, *stream, {}); }), ErrorKind::kBadArgument,
               {"peer 1 is out of range; ranks are 0 to 0"});
  expect_error(thrown_by([&] { heap.put(0, 0, 0, nullptr, 8, 0, *stream, {}); }), ErrorKind::kBadArgument,
               {"8 bytes from"});
  heap.close();
}

}  // namespace
}  // namespace flashoverlap::test

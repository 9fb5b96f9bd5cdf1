#include <array>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "comm/guarded_buffer.h"
#include "comm/ranks.h"
#include "flashoverlap/host_stream.h"
#include "flashoverlap/in_process.h"
#include "support/seed.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define FLASHOVERLAP_TEST_SANITIZED 1
#else
#define FLASHOVERLAP_TEST_SANITIZED 0
#endif

namespace flashoverlap::test {
namespace {

constexpr DType kType = DType::kFloat32;
constexpr bool kSanitized = FLASHOVERLAP_TEST_SANITIZED == 1;

// Sleeps now and then for up to 200 us.
class Delays {
 public:
  Delays(std::uint64_t seed, int rank)
      : rng_(seed + std::uint64_t{1000003} * static_cast<std::uint64_t>(rank)) {}
  void maybe() {
    if (rng_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng_() % 200));
  }

 private:
  std::mt19937_64 rng_;
};

class StressTest : public SeededTest {};

// Known fault B11: nothing is seen early or torn.
TEST_F(StressTest, ManySmallAllReducesEveryElementChecked) {
  for (const int world_size : {2, 4}) {
    const int num_calls = kSanitized ? 400 : 10'000;
    run_ranks(world_size, {}, [&](CommunicatorPointer communicator) {
      const auto stream = communicator->make_stream("stream");
      std::vector<float> values(16 * 128);
      std::int64_t wrong = 0;
      for (int call = 0; call < num_calls; ++call) {
        const auto value = [&](int rank, std::size_t i) {
          return static_cast<int>(i % 9) * (rank + 1) + call % 5;
        };
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = static_cast<float>(value(communicator->rank(), i));
        communicator->all_reduce(values.data(), values.data(), 16 * 128, kType, *stream, {});
        stream->synchronize();
        const int weights = world_size * (world_size + 1) / 2;
        for (std::size_t i = 0; i < values.size(); ++i) {
          const int expected = static_cast<int>(i % 9) * weights + world_size * (call % 5);
          if (values[i] != static_cast<float>(expected)) ++wrong;
        }
      }
      EXPECT_EQ(wrong, 0);
    });
  }
}

// Different calls on several streams at once; streams reach them in any order.
TEST_F(StressTest, ManyStreamsWithRandomDelays) {
  const std::uint64_t base = rng_();
  constexpr int kStreams = 4;
  const int num_rounds = kSanitized ? 60 : 500;
  run_ranks(3, {}, [&](CommunicatorPointer communicator) {
    const int rank = communicator->rank();
    Delays delays(base, rank);
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<GuardedBuffer> buffers;
    for (int i = 0; i < kStreams; ++i) {
      streams.push_back(communicator->make_stream("stream"));
      buffers.emplace_back(3 * (i + 1), kType);
    }
    for (int round = 0; round < num_rounds; ++round) {
      for (std::size_t i = 0; i < kStreams; ++i) {
        auto& stream = dynamic_cast<HostStream&>(*streams[i]);
        GuardedBuffer& buffer = buffers[i];
        stream.enqueue([&target = buffer, rank, round] {
          target.fill([&](std::int64_t j) { return (rank + 1) * (j + 1) + round % 7; });
          if ((rank * 7 + round) % 11 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
        });
        communicator->all_reduce(buffer.data(), buffer.data(), buffer.count(), kType, stream, {"a", round});
        const std::vector<std::int64_t> counts(3, buffer.count() / 3);
        communicator->all_gather(buffer.at(rank * counts[0]), buffer.data(), counts, kType, stream,
                                 {"b", round});
      }
      delays.maybe();
      for (std::size_t i = 0; i < kStreams; ++i) {
        streams[i]->synchronize();
        buffers[i].expect([&](std::int64_t j) { return 6 * (j + 1) + 3 * (round % 7); });
      }
    }
  });
}

// Sends to all, receives from all, on a stream per direction and peer; known fault B39: buffers are reused at
// once.
TEST_F(StressTest, PointToPointBetweenAllPairs) {
  const std::uint64_t base = rng_();
  const int num_rounds = kSanitized ? 40 : 400;
  for (const int world_size : {1, 2, 5}) {
    run_ranks(world_size, {}, [&](CommunicatorPointer communicator) {
      const int rank = communicator->rank();
      Delays delays(base, rank);
      std::vector<std::unique_ptr<Stream>> streams;
      std::vector<GuardedBuffer> sent;
      std::vector<GuardedBuffer> received;
      for (int peer = 0; peer < world_size; ++peer) {
        streams.push_back(communicator->make_stream("send"));
        streams.push_back(communicator->make_stream("receive"));
        sent.emplace_back(33 + rank + peer, DType::kBFloat16);
        received.emplace_back(33 + rank + peer, DType::kBFloat16);
      }
      for (int round = 0; round < num_rounds; ++round) {
        delays.maybe();
        for (int peer = 0; peer < world_size; ++peer) {
          const auto p = static_cast<std::size_t>(peer);
          sent[p].fill([&](std::int64_t i) { return (rank * 5 + peer * 3 + i + round) % 200; });
          communicator->send(sent[p].data(), sent[p].count(), DType::kBFloat16, peer, *streams[2 * p], {});
          communicator->receive(received[p].data(), received[p].count(), DType::kBFloat16, peer,
                                *streams[2 * p + 1], {});
        }
        for (const auto& stream : streams) stream->synchronize();
        for (int peer = 0; peer < world_size; ++peer) {
          const auto p = static_cast<std::size_t>(peer);
          received[p].expect([&](std::int64_t i) { return (peer * 5 + rank * 3 + i + round) % 200; });
          sent[p].poison();
          received[p].poison();
        }
      }
    });
  }
}

// The k-th send matches the k-th receive, whatever streams they are on.
TEST_F(StressTest, PointToPointIsFirstInFirstOut) {
  run_ranks(2, {}, [&](CommunicatorPointer communicator) {
    const auto a = communicator->make_stream("a");
    const auto b = communicator->make_stream("b");
    std::array<float, 100> values{};
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (communicator->rank() == 0) {
        values[i] = static_cast<float>(i);
        communicator->send(&values[i], 1, kType, 1, *a, {});
      } else {
        communicator->receive(&values[i], 1, kType, 0, i % 2 == 0 ? *a : *b, {});
      }
    }
    a->synchronize();
    b->synchronize();
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], static_cast<float>(i));
  });
}

// Known fault B37: many more threads than cores, and all of them wait most of the time.
TEST_F(StressTest, MoreThreadsThanCores) {
  run_ranks(8, {}, [&](CommunicatorPointer communicator) {
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::vector<float>> values(4, std::vector<float>(256 * 64));
    for (int i = 0; i < 4; ++i) streams.push_back(communicator->make_stream("stream"));
    for (int call = 0; call < (kSanitized ? 10 : 50); ++call) {
      for (std::size_t i = 0; i < 4; ++i) {
        std::fill(values[i].begin(), values[i].end(), static_cast<float>(communicator->rank() + call));
        communicator->all_reduce(values[i].data(), values[i].data(), 256 * 64, kType, *streams[i], {});
      }
      for (std::size_t i = 0; i < 4; ++i) {
        streams[i]->synchronize();
        for (const float value : values[i]) ASSERT_EQ(value, static_cast<float>(28 + 8 * call));
      }
    }
  });
}

// Known fault B05 (c), and subgroups of subgroups, next to calls of the whole world.
TEST_F(StressTest, SubgroupsFollowTheListedOrder) {
  for (const bool reversed : {false, true}) {
    run_ranks(4, {}, [&](CommunicatorPointer world) {
      const auto stream = world->make_stream("stream");
      float everybody = static_cast<float>(1 << world->rank());
      if (world->rank() >= 2) {
        const auto pair = world->subgroup(reversed ? std::array{3, 2} : std::array{2, 3});
        EXPECT_EQ(pair->size(), 2);
        EXPECT_EQ(pair->rank(), reversed ? 3 - world->rank() : world->rank() - 2);
        const auto first = static_cast<float>(10 * world->rank());
        std::array<float, 2> values{first + 1, first + 2};
        float piece = 0;
        pair->reduce_scatter(values.data(), &piece, std::array<std::int64_t, 2>{1, 1}, kType, *stream, {});
        world->all_reduce(&everybody, &everybody, 1, kType, *stream, {});
        stream->synchronize();
        EXPECT_EQ(piece, pair->rank() == 0 ? 52.0F : 54.0F);
        const auto alone = pair->subgroup(std::array{pair->rank()});
        EXPECT_EQ(alone->size(), 1);
        alone->all_reduce(&piece, &values[0], 1, kType, *stream, {});
        stream->synchronize();
        EXPECT_EQ(values[0], piece);
      } else {
        world->all_reduce(&everybody, &everybody, 1, kType, *stream, {});
        stream->synchronize();
      }
      EXPECT_EQ(everybody, 15.0F);
      const auto nested = world->subgroup(std::array{3, 1, 0, 2})->subgroup(std::array{2, 0, 1, 3});
      const auto ranks = nested->exchange(static_cast<std::uint64_t>(world->rank()), {});
      EXPECT_EQ(ranks, (std::vector<std::uint64_t>{0, 3, 1, 2}));
    });
  }
}

// A paced world gives the same results; several calls are in flight at once.
TEST_F(StressTest, PacedCallsStayRight) {
  run_ranks(3, {{1.0, 20.0}, std::chrono::milliseconds{60'000}}, [&](CommunicatorPointer communicator) {
    const auto a = communicator->make_stream("a");
    const auto b = communicator->make_stream("b");
    std::vector<float> x(10'000, static_cast<float>(communicator->rank()));
    std::vector<float> y(10'000, 1.0F);
    for (int call = 0; call < 5; ++call) {
      communicator->all_reduce(x.data(), x.data(), 10'000, kType, *a, {});
      communicator->all_reduce(y.data(), y.data(), 10'000, kType, *b, {});
    }
    a->synchronize();
    b->synchronize();
    for (const float value : x) ASSERT_EQ(value, 3.0F * 81.0F);
    for (const float value : y) ASSERT_EQ(value, 243.0F);
  });
}

}  // namespace
}  // namespace flashoverlap::test

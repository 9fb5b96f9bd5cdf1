#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "comm/guarded_buffer.h"
#include "comm/ranks.h"
#include "flashoverlap/in_process.h"

namespace flashoverlap::test {
namespace {

// Small integers: sums over up to 16 ranks stay within 256, exact in every type and order. Different for each
// rank.
std::int64_t input(int rank, std::int64_t index) {
  return (13 * rank + 7 * index + rank * index) % 31 - 15;
}

std::int64_t sum(int world_size, std::int64_t index) {
  std::int64_t total = 0;
  for (int rank = 0; rank < world_size; ++rank) total += input(rank, index);
  return total;
}

std::int64_t total(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::int64_t before(const std::vector<std::int64_t>& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

// Uneven, some 0, one beyond the size of a piece.
std::vector<std::int64_t> uneven_counts(int world_size) {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < world_size; ++rank) {
    counts.push_back(rank % 3 == 1 ? 0 : (rank % 4 == 2 ? 20000 : 3 + 5 * rank));
  }
  return counts;
}

struct Case {
  int world_size;
  DType dtype;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const int world_size : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      cases.push_back({world_size, dtype});
  }
  return cases;
}

class CollectivesTest : public ::testing::TestWithParam<Case> {
 protected:
  static int world_size() { return GetParam().world_size; }
  static DType dtype() { return GetParam().dtype; }
  static std::size_t own(const Communicator& communicator) {
    return static_cast<std::size_t>(communicator.rank());
  }
};

TEST_P(CollectivesTest, AllReduceAddsUp) {
  run_ranks(world_size(), {}, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    for (const std::int64_t count : {0, 1, 7, 1024, 1025, 40000}) {
      GuardedBuffer send(count, dtype());
      GuardedBuffer receive(count, dtype());
      send.fill([&](std::int64_t i) { return input(communicator->rank(), i); });
      communicator->all_reduce(send.data(), receive.data(), count, dtype(), *stream, {});
      stream->synchronize();
      receive.expect([](std::int64_t i) { return sum(world_size(), i); });
      send.expect([&](std::int64_t i) { return input(communicator->rank(), i); });
    }
  });
}

TEST_P(CollectivesTest, AllReduceInPlace) {
  run_ranks(world_size(), {}, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    for (const std::int64_t count : {1, 1023, 33000}) {
      GuardedBuffer buffer(count, dtype());
      buffer.fill([&](std::int64_t i) { return input(communicator->rank(), i); });
      communicator->all_reduce(buffer.data(), buffer.data(), count, dtype(), *stream, {});
      stream->synchronize();
      buffer.expect([](std::int64_t i) { return sum(world_size(), i); });
    }
  });
}

TEST_P(CollectivesTest, ReduceScatterGivesEachRankItsChunk) {
  run_ranks(world_size(), {}, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    const auto counts = uneven_counts(world_size());
    const std::int64_t first = before(counts, communicator->rank());
    GuardedBuffer send(total(counts), dtype());
    GuardedBuffer receive(counts[own(*communicator)], dtype());
    send.fill([&](std::int64_t i) { return input(communicator->rank(), i); });
    communicator->reduce_scatter(send.data(), receive.data(), counts, dtype(), *stream, {});
    stream->synchronize();
    receive.expect([&](std::int64_t i) { return sum(world_size(), first + i); });
    send.expect([&](std::int64_t i) { return input(communicator->rank(), i); });
  });
}

TEST_P(CollectivesTest, ReduceScatterInPlaceLeavesTheOtherChunks) {
  run_ranks(world_size(), {}, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    const auto counts = uneven_counts(world_size());
    const std::int64_t first = before(counts, communicator->rank());
    const std::int64_t end = first + counts[own(*communicator)];
    GuardedBuffer buffer(total(counts), dtype());
    buffer.fill([&](std::int64_t i) { return input(communicator->rank(), i); });
    communicator->reduce_scatter(buffer.data(), buffer.at(first), counts, dtype(), *stream, {});
    stream->synchronize();
    buffer.expect([&](std::int64_t i) {
      return i >= first && i < end ? sum(world_size(), i) : input(communicator->rank(), i);
    });
  });
}

TEST_P(CollectivesTest, AllGatherInPlaceAndOutOfPlace) {
  run_ranks(world_size(), {}, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    const auto counts = uneven_counts(world_size());
    const std::int64_t first = before(counts, communicator->rank());
    GuardedBuffer send(counts[own(*communicator)], dtype());
    GuardedBuffer apart(total(counts), dtype());
    GuardedBuffer in_place(total(counts), dtype());
    for (std::int64_t i = 0; i < send.count(); ++i) {
      send.set(i, input(communicator->rank(), i));
      in_place.set(first + i, input(communicator->rank(), i));
    }
    communicator->all_gather(send.data(), apart.data(), counts, dtype(), *stream, {});
    communicator->all_gather(in_place.at(first), in_place.data(), counts, dtype(), *stream, {});
    stream->synchronize();
    const auto expected = [&](std::int64_t i) {
      int source = 0;
      while (i >= before(counts, source + 1)) ++source;
      return input(source, i - before(counts, source));
    };
    apart.expect(expected);
    in_place.expect(expected);
    send.expect_guards();
  });
}

// What `source` sends to `destination` in an all-to-all: uneven, often nothing.
std::int64_t exchanged(int source, int destination) {
  if ((source + 2 * destination) % 4 == 0) return 0;
  return source == 2 && destination == 1 ? 20000 : 1 + 3 * source + destination;
}

TEST_P(CollectivesTest, AllToAllWithUnevenCounts) {
  run_ranks(world_size(), {}, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    const int rank = communicator->rank();
    std::vector<std::int64_t> send_counts;
    std::vector<std::int64_t> receive_counts;
    for (int peer = 0; peer < world_size(); ++peer) {
      send_counts.push_back(exchanged(rank, peer));
      receive_counts.push_back(exchanged(peer, rank));
    }
    GuardedBuffer send(total(send_counts), dtype());
    GuardedBuffer receive(total(receive_counts), dtype());
    send.fill([&](std::int64_t i) { return input(rank, i); });
    communicator->all_to_all(send.data(), send_counts, receive.data(), receive_counts, dtype(), *stream, {});
    stream->synchronize();
    receive.expect([&](std::int64_t i) {
      int source = 0;
      while (i >= before(receive_counts, source + 1)) ++source;
      std::int64_t sent_before = 0;
      for (int peer = 0; peer < rank; ++peer) sent_before += exchanged(source, peer);
      return input(source, sent_before + i - before(receive_counts, source));
    });
    send.expect([&](std::int64_t i) { return input(rank, i); });
  });
}

TEST_P(CollectivesTest, NothingToSendAnywhere) {
  run_ranks(world_size(), {}, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    const std::vector<std::int64_t> none(static_cast<std::size_t>(world_size()), 0);
    communicator->all_reduce(nullptr, nullptr, 0, dtype(), *stream, {});
    communicator->reduce_scatter(nullptr, nullptr, none, dtype(), *stream, {});
    communicator->all_gather(nullptr, nullptr, none, dtype(), *stream, {});
    communicator->all_to_all(nullptr, none, nullptr, none, dtype(), *stream, {});
    communicator->barrier(*stream, {});
    stream->synchronize();
  });
}

TEST_P(CollectivesTest, ExchangeTellsEverybodyEverything) {
  run_ranks(world_size(), {}, [](CommunicatorPointer communicator) {
    const auto rank = static_cast<std::uint64_t>(communicator->rank());
    const auto integers = communicator->exchange((rank << 40U) + 5, {"agreement"});
    const auto strings = communicator->exchange(std::string(rank * 1000, static_cast<char>('a' + rank)), {});
    ASSERT_EQ(integers.size(), static_cast<std::size_t>(world_size()));
    ASSERT_EQ(strings.size(), static_cast<std::size_t>(world_size()));
    for (std::uint64_t peer = 0; peer < integers.size(); ++peer) {
      EXPECT_EQ(integers[peer], (peer << 40U) + 5);
      EXPECT_EQ(strings[peer], std::string(peer * 1000, static_cast<char>('a' + peer)));
    }
  });
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& test) {
  return std::string(name_of(test.param.dtype)) + "_" + std::to_string(test.param.world_size);
}

INSTANTIATE_TEST_SUITE_P(All, CollectivesTest, ::testing::ValuesIn(all_cases()), name_of_case);

// 1 + 2^-24 + 2^-24 is 1 when added one by one, and more than 1 when the small ones come first: the order is
// the ranks'.
TEST(SumTest, IsTakenInRankOrderInFloat32AndRoundedOnce) {
  run_ranks(3, {}, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    const float small = 1.0F / (1 << 24);
    std::vector<float> values(2000, communicator->rank() == 0 ? 1.0F : small);
    communicator->all_reduce(values.data(), values.data(), 2000, DType::kFloat32, *stream, {});
    // 256 + 1 + 1 is 258 in float32, but 256 when each step is rounded to bfloat16.
    GuardedBuffer half(5, DType::kBFloat16);
    half.fill([&](std::int64_t) { return communicator->rank() == 0 ? 256 : 1; });
    communicator->all_reduce(half.data(), half.data(), 5, DType::kBFloat16, *stream, {});
    stream->synchronize();
    EXPECT_EQ(*std::max_element(values.begin(), values.end()), 1.0F);
    half.expect([](std::int64_t) { return 258; });
  });
}

// The row splits of known fault B15, in rows of 128.
TEST(AllToAllTest, OnlyOneRankHasData) {
  for (const auto& splits : std::vector<std::vector<std::vector<std::int64_t>>>{
           {{64, 64}, {0, 0}}, {{0, 0}, {0, 0}}, {{0, 5, 0}, {0, 0, 0}, {7, 0, 0}}}) {
    const int world_size = static_cast<int>(splits.size());
    run_ranks(world_size, {}, [&](CommunicatorPointer communicator) {
      const auto stream = communicator->make_stream("stream");
      const auto rank = static_cast<std::size_t>(communicator->rank());
      std::vector<std::int64_t> send_counts;
      std::vector<std::int64_t> receive_counts;
      for (std::size_t peer = 0; peer < splits.size(); ++peer) {
        send_counts.push_back(splits[rank][peer] * 128);
        receive_counts.push_back(splits[peer][rank] * 128);
      }
      GuardedBuffer send(total(send_counts), DType::kFloat32);
      GuardedBuffer receive(total(receive_counts), DType::kFloat32);
      send.fill([&](std::int64_t i) { return input(communicator->rank(), i); });
      communicator->all_to_all(send.data(), send_counts, receive.data(), receive_counts, DType::kFloat32,
                               *stream, {});
      stream->synchronize();
      // In these splits a rank receives from at most one other.
      const auto source = static_cast<int>(
          std::find_if(receive_counts.begin(), receive_counts.end(), [](auto count) { return count > 0; }) -
          receive_counts.begin());
      receive.expect([&](std::int64_t i) {
        std::int64_t first = 0;
        for (std::size_t peer = 0; peer < rank; ++peer)
          first += splits[static_cast<std::size_t>(source)][peer] * 128;
        return input(source, first + i);
      });
    });
  }
}

}  // namespace
}  // namespace flashoverlap::test

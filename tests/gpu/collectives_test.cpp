// The GPU communicators: every collective, even and uneven counts, exact data.
#include <numeric>

#include "check.h"
#include "device.h"
#include "flashoverlap/cuda_context.h"
#include "gpu_matrix.h"
#include "gpu_ranks.h"
#include "gpu_test.h"
#include "peer_kernels.h"
#include "peer_reader.h"

namespace flashoverlap::gpu_test {
namespace {

using Counts = std::vector<std::int64_t>;

// Element i of rank r's data; sums over 4 ranks stay below 256.
float value_of(int rank, std::int64_t i) {
  return static_cast<float>((i * 7 + rank * 13) % 41 - 20);
}

std::int64_t total(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::int64_t begin_of(const Counts& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

DeviceMatrix data_of(int rank, std::int64_t count, DType dtype) {
  DeviceMatrix matrix(1, count, count, dtype);
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(value_of(rank, i));
  matrix.fill(values);
  return matrix;
}

void expect_values(const DeviceMatrix& matrix, std::int64_t count,
                   const std::function<float(std::int64_t)>& expected, const std::string& what) {
  const std::vector<float> got = matrix.read();
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = got[static_cast<std::size_t>(i)];
    GPU_EXPECT(value == expected(i),
               what << " element " << i << " is " << value << ", expected " << expected(i));
  }
}

float sum_of(int world_size, std::int64_t i) {
  float sum = 0;
  for (int r = 0; r < world_size; ++r) sum += value_of(r, i);
  return sum;
}

void all_collectives(Rank& rank, const Counts& counts, DType dtype) {
  const int world = rank.world_size;
  const std::int64_t count = total(counts);
  const std::int64_t own = counts[static_cast<std::size_t>(rank.rank)];
  const std::int64_t own_begin = begin_of(counts, rank.rank);
  Communicator& communicator = *rank.communicator;
  const auto stream = communicator.make_stream("test");
  const TransferLabel label{.operation = "test of collectives"};
  const std::string where = std::string(communicator.name()) + " rank " + std::to_string(rank.rank) +
                            " count " + std::to_string(count);

  const DeviceMatrix send = data_of(rank.rank, count, dtype);
  const DeviceMatrix reduced(1, count, count, dtype);
  communicator.all_reduce(send.data(), reduced.data(), count, dtype, *stream, label);
  DeviceMatrix in_place = data_of(rank.rank, count, dtype);
  communicator.all_reduce(in_place.data(), in_place.data(), count, dtype, *stream, label);
  const DeviceMatrix scattered(1, own, own, dtype);
  communicator.reduce_scatter(send.data(), scattered.data(), counts, dtype, *stream, label);
  const DeviceMatrix gathered(1, count, count, dtype);
  communicator.all_gather(static_cast<char*>(send.data()) + own_begin * 2, gathered.data(), counts, dtype,
                          *stream, label);
  // To rank d goes chunk d of everybody's data.
  const Counts receives(static_cast<std::size_t>(world), own);
  const DeviceMatrix exchanged(1, own * world, own * world, dtype);
  communicator.all_to_all(send.data(), counts, exchanged.data(), receives, dtype, *stream, label);
  communicator.barrier(*stream, label);
  stream->synchronize();

  expect_values(
      reduced, count, [&](std::int64_t i) { return sum_of(world, i); }, where + " all-reduce");
  expect_values(
      in_place, count, [&](std::int64_t i) { return sum_of(world, i); }, where + " all-reduce in place");
  expect_values(
      scattered, own, [&](std::int64_t i) { return sum_of(world, own_begin + i); },
      where + " reduce-scatter");
  for (int r = 0; r < world; ++r) {
    const std::int64_t begin = begin_of(counts, r);
    const std::vector<float> got = gathered.read();
    for (std::int64_t i = begin; i < begin + counts[static_cast<std::size_t>(r)]; ++i) {
      GPU_EXPECT(got[static_cast<std::size_t>(i)] == value_of(r, i), where << " all-gather element " << i);
    }
  }
  expect_values(
      exchanged, own * world,
      [&](std::int64_t i) { return value_of(static_cast<int>(i / own), own_begin + i % own); },
      where + " all-to-all");
}

}  // namespace

namespace {

void all_collectives_of(int world) {
  for (const CommunicatorKind kind : kinds_for(world)) {
    Group& group = shared_group(world, kind);
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      group.run([&](Rank& rank) {
        all_collectives(rank, Counts(static_cast<std::size_t>(world), 1024), dtype);
        Counts uneven;
        for (int r = 0; r < world; ++r) uneven.push_back(r == 1 ? 0 : 37 * r + 5);
        all_collectives(rank, uneven, dtype);
      });
    }
  }
}

}  // namespace

GPU_TEST(collectives) {
  for (const int world : world_sizes()) all_collectives_of(world);
}

GPU_TEST(one_rank_collectives) {
  all_collectives_of(1);
}

GPU_TEST(subgroups) {
  for (const CommunicatorKind kind : kinds_for(4)) {
    shared_group(4, kind).run([&](Rank& rank) {
      if (rank.rank < 2) return;
      const int listed[] = {3, 2};
      Rank sub;
      sub.world_size = 2;
      sub.communicator = rank.communicator->subgroup(listed);
      sub.rank = sub.communicator->rank();
      GPU_EXPECT(sub.rank == 3 - rank.rank,
                 "rank " << rank.rank << " has rank " << sub.rank << " in the group {3, 2}");
      all_collectives(sub, {64, 65}, DType::kFloat16);
    });
  }
}

namespace {

void one_rank_never_calls(CommunicatorKind kind) {
  {
    GroupOptions options;
    options.world_size = 3;
    options.kind = kind;
    options.compute_sms = 8;
    options.timeout = std::chrono::milliseconds(1500) * patience();
    Group group(options);
    const auto errors = group.run_all(
        [&](Rank& rank) {
          if (rank.rank == 1) return;
          const auto stream = rank.communicator->make_stream("test");
          const DeviceMatrix data = data_of(rank.rank, 4096, DType::kFloat16);
          rank.communicator->all_reduce(data.data(), data.data(), 4096, DType::kFloat16, *stream,
                                        {.operation = "lonely call", .group = 5});
          stream->synchronize();
        },
        false);
    for (const std::size_t r : {0U, 2U}) {
      if (ranks_are_processes() && static_cast<int>(r) != group.first_rank()) continue;
      GPU_EXPECT(errors[r].find("lonely call") != std::string::npos &&
                     errors[r].find("1500 ms") != std::string::npos,
                 name_of(kind) << " rank " << r << " says: " << errors[r]);
    }
    // And every further call throws.
    const auto again =
        group.run_all([&](Rank& rank) { rank.communicator->exchange(std::uint64_t{1}, {}); }, false);
    GPU_EXPECT(ranks_are_processes() || (!again[0].empty() && !again[2].empty()),
               "a call on a failed communicator went through");
  }
}

}  // namespace

GPU_TEST(a_rank_that_never_calls_local) {
  one_rank_never_calls(CommunicatorKind::kLocal);
}

GPU_TEST(a_rank_that_never_calls_nccl) {
  if (const std::string why = why_no_nccl(3); !why.empty()) throw Skip(why);
  one_rank_never_calls(CommunicatorKind::kNccl);
}

GPU_TEST(an_abort_reaches_every_rank) {
  if (ranks_are_processes()) throw Skip("an abort ends the rendezvous for the tests behind it, too");
  for (const CommunicatorKind kind : kinds_for(2)) {
    GroupOptions options;
    options.kind = kind;
    options.compute_sms = 8;
    Group group(options);
    const auto errors = group.run_all(
        [&](Rank& rank) {
          if (rank.rank == 1) {
            rank.communicator->abort("its machine burns");
            return;
          }
          const auto stream = rank.communicator->make_stream("test");
          const DeviceMatrix data = data_of(rank.rank, 4096, DType::kFloat16);
          rank.communicator->all_reduce(data.data(), data.data(), 4096, DType::kFloat16, *stream,
                                        {.operation = "call"});
          stream->synchronize();
        },
        false);
    GPU_EXPECT(group.first_rank() != 0 || errors[0].find("its machine burns") != std::string::npos,
               name_of(kind) << " rank 0 says: " << errors[0]);
  }
}

GPU_TEST(calls_that_do_not_match) {
  GroupOptions options;
  options.compute_sms = 8;
  Group group(options);
  const auto errors = group.run_all(
      [&](Rank& rank) {
        const auto stream = rank.communicator->make_stream("test");
        const DeviceMatrix data = data_of(rank.rank, 64, DType::kFloat16);
        rank.communicator->all_reduce(data.data(), data.data(), 64 - rank.rank, DType::kFloat16, *stream,
                                      {.operation = "call"});
      },
      false);
  for (int r = group.first_rank(); r < (ranks_are_processes() ? group.first_rank() + 1 : 2); ++r) {
    const std::string& error = errors[static_cast<std::size_t>(r)];
    GPU_EXPECT(error.find("do not match") != std::string::npos, "it says: " << error);
  }
}

// Each message waits for its own data, which is written late, one after the other.
GPU_TEST(messages_wait_for_what_is_ready) {
  if (ranks_are_processes()) throw Skip("events of other processes are not known");
  constexpr std::int64_t kCount = 1000;
  constexpr std::int64_t kMessages = 3;
  constexpr std::size_t kBytes = 2 * kCount;
  constexpr std::uint64_t kDelayNs = 2'000'000;
  for (const CommunicatorKind kind : {CommunicatorKind::kLocal, CommunicatorKind::kCopyEngine}) {
    shared_group(2, kind).run([&](Rank& rank) {
      const auto stream = rank.communicator->make_stream("copies");
      const auto writer = make_cuda_stream(rank.options);
      auto* const writes = static_cast<cudaStream_t>(native_handle(*writer));
      cuda::DeviceBuffer begin(rank.options.device, 64, "a delay of a test");
      const DeviceMatrix source = data_of(rank.rank, kMessages * kCount, DType::kFloat16);
      DeviceMatrix sent(1, kMessages * kCount, kMessages * kCount, DType::kFloat16);
      DeviceMatrix received(1, kMessages * kCount, kMessages * kCount, DType::kFloat16);
      const std::vector<cuda::Event> ready(kMessages);
      std::vector<cuda::PeerMessage> sends, receives;
      for (std::size_t i = 0; i < ready.size(); ++i) {
        const auto at = [&](const DeviceMatrix& matrix) {
          return static_cast<char*>(matrix.data()) + i * kBytes;
        };
        cuda::launch_pace_begin(static_cast<std::uint64_t*>(begin.data()), writes);
        cuda::launch_pace_end(static_cast<std::uint64_t*>(begin.data()), kDelayNs, writes);
        FLASHOVERLAP_CUDA_CHECK(
            cudaMemcpyAsync(at(sent), at(source), kBytes, cudaMemcpyDeviceToDevice, writes));
        ready[i].record(writes);
        sends.push_back({1 - rank.rank, at(sent), kCount, &ready[i]});
        receives.push_back({1 - rank.rank, at(received), kCount});
      }
      dynamic_cast<cuda::PeerReader&>(*rank.communicator)
          .exchange_messages(sends, receives, DType::kFloat16, *stream, {.operation = "test"},
                             {.begins = [](std::size_t) {}, .arrived = [](std::size_t) {}});
      stream->synchronize();
      writer->synchronize();
      const std::vector<float> expected = data_of(1 - rank.rank, kMessages * kCount, DType::kFloat16).read();
      GPU_EXPECT(received.read() == expected, name_of(kind) << ", rank " << rank.rank << ": another message");
    });
  }
}

// Messages between ranks that read each other's memory: each goes to its receiver, in order; what does not
// match is said.
GPU_TEST(messages_in_one_meeting) {
  constexpr std::int64_t kCount = 1000;
  for (const CommunicatorKind kind : {CommunicatorKind::kLocal, CommunicatorKind::kCopyEngine}) {
    GroupOptions options;
    options.world_size = 3;
    options.compute_sms = 8;
    options.kind = kind;
    Group group(options);
    group.run([&](Rank& rank) {
      const auto stream = rank.communicator->make_stream("test");
      auto& peers = dynamic_cast<cuda::PeerReader&>(*rank.communicator);
      const DeviceMatrix own = data_of(rank.rank, 2 * kCount, DType::kFloat16);
      DeviceMatrix received(1, 4 * kCount, 4 * kCount, DType::kFloat16);
      received.poison();
      const auto element = [](const DeviceMatrix& data, std::int64_t i) {
        return static_cast<void*>(static_cast<std::uint16_t*>(data.data()) + i);
      };
      std::vector<cuda::PeerMessage> sends, receives;
      for (int distance = 1; distance < 3; ++distance) {
        const int to = (rank.rank + distance) % 3;
        sends.push_back({to, element(own, 0), kCount});
        sends.push_back({to, element(own, kCount), kCount});
        for (int i = 0; i < 2; ++i) {
          const auto at = static_cast<std::int64_t>(receives.size()) * kCount;
          receives.push_back({(rank.rank + 3 - distance) % 3, element(received, at), kCount});
        }
      }
      std::ostringstream told;
      const cuda::MessageHooks hooks{.begins = [&](std::size_t i) { told << "b" << i; },
                                     .arrived = [&](std::size_t i) { told << "a" << i; }};
      peers.exchange_messages(sends, receives, DType::kFloat16, *stream, {.operation = "test"}, hooks);
      stream->synchronize();
      GPU_EXPECT(told.str() == "b0a0b1a1b2a2b3a3", "not told of every message in order: " << told.str());
      const std::vector<float> got = received.read();
      for (int distance = 1; distance < 3; ++distance) {
        const std::vector<float> expected =
            data_of((rank.rank + 3 - distance) % 3, 2 * kCount, DType::kFloat16).read();
        const auto begin = got.begin() + (distance - 1) * 2 * kCount;
        GPU_EXPECT(std::equal(expected.begin(), expected.end(), begin),
                   name_of(kind) << ", rank " << rank.rank << ": what came from distance " << distance);
      }
    });
    const auto errors = group.run_all(
        [&](Rank& rank) {
          const auto stream = rank.communicator->make_stream("test");
          const DeviceMatrix data = data_of(rank.rank, kCount, DType::kFloat16);
          std::vector<cuda::PeerMessage> sends, receives;
          if (rank.rank == 0) sends = {{1, data.data(), kCount}};
          if (rank.rank == 1) receives = {{0, data.data(), kCount - 1}};
          dynamic_cast<cuda::PeerReader&>(*rank.communicator)
              .exchange_messages(sends, receives, DType::kFloat16, *stream, {.operation = "test"},
                                 {.begins = [](std::size_t) {}, .arrived = [](std::size_t) {}});
        },
        false);
    for (const std::string& error : errors) {
      if (ranks_are_processes() && error.empty()) continue;  // of another process
      GPU_EXPECT(error.find("rank 0 sends messages of [1000] elements to rank 1, which expects [999]") !=
                     std::string::npos,
                 name_of(kind) << " says: " << error);
    }
  }
}

}  // namespace flashoverlap::gpu_test

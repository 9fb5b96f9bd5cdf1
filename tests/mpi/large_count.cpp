// Calls of any number of elements, beyond what MPI's own counts (int) can say.
//
//   mpirun -n 2 mpi_large_count ELEMENTS        2147483700 needs 9 GB
#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "flashoverlap/mpi.h"

namespace flashoverlap::test {
namespace {

// Bfloat16 of small integers: the upper half of their float's bits. Exact sums of few ranks.
std::uint16_t bits_of(float value) {
  std::uint32_t bits = 0;
  static_assert(sizeof bits == sizeof value);
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16U);
}

// A prime period, so that a shift by any power of two shows.
constexpr std::int64_t kPeriod = 97;
float value_of(std::int64_t rank, std::int64_t i) {
  return static_cast<float>(i % kPeriod + rank);
}

void fill(std::vector<std::uint16_t>& data, std::int64_t rank) {
  for (std::size_t i = 0; i < data.size(); ++i)
    data[i] = bits_of(value_of(rank, static_cast<std::int64_t>(i)));
}

template <typename Expected>
void check(const std::vector<std::uint16_t>& data, const char* call, Expected expected) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    const float value = expected(static_cast<std::int64_t>(i));
    if (data[i] == bits_of(value)) continue;
    throw std::runtime_error(
        fmt::format("{}: element {} has bits {:#x}, not those of {}", call, i, data[i], value));
  }
}

void run(std::int64_t count) {
  // Filling and checking takes minutes on a busy machine, and not equally long on both ranks.
  const auto communicator = make_mpi_communicator({.timeout = std::chrono::minutes{10}});
  const int rank = communicator->rank();
  const int ranks = communicator->size();
  if (ranks != 2) throw std::runtime_error("start it with mpirun -n 2");
  const auto stream = communicator->make_stream("stream");
  std::vector<std::uint16_t> data(static_cast<std::size_t>(count));

  fill(data, rank);
  communicator->all_reduce(data.data(), data.data(), count, DType::kBFloat16, *stream,
                           {.operation = "large"});
  stream->synchronize();
  check(data, "all-reduce", [](std::int64_t i) { return value_of(0, i) + value_of(1, i); });

  fill(data, rank);
  if (rank == 0) communicator->send(data.data(), count, DType::kBFloat16, 1, *stream, {.operation = "large"});
  if (rank == 1)
    communicator->receive(data.data(), count, DType::kBFloat16, 0, *stream, {.operation = "large"});
  stream->synchronize();
  check(data, "send", [](std::int64_t i) { return value_of(0, i); });

  // Chunks whose sizes and offsets are beyond, too: rank 0 gives almost all.
  const std::vector<std::int64_t> counts = {count - count / 16, count / 16};
  const std::int64_t begin = rank == 0 ? 0 : counts[0];
  fill(data, rank);
  communicator->all_gather(data.data() + begin, data.data(), counts, DType::kBFloat16, *stream,
                           {.operation = "large"});
  stream->synchronize();
  check(data, "all-gather", [&](std::int64_t i) { return value_of(i < counts[0] ? 0 : 1, i); });
  if (rank == 0) fmt::print("{} elements: all-reduce, send and all-gather are right\n", count);
}

}  // namespace
}  // namespace flashoverlap::test

int main(int argc, char** argv) {
  try {
    flashoverlap::test::run(argc > 1 ? std::stoll(argv[1]) : 5'000'003);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "mpi_large_count: {}\n", error.what());
    return 1;
  }
}

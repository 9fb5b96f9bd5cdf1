// Mixed calls of changing shapes over MPI, with random delays: every result exact, memory flat.
//
//   mpirun -n 4 mpi_soak CALLS [SEED]
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "flashoverlap/mpi.h"
#include "flashoverlap/operators.h"

namespace flashoverlap::test {
namespace {

constexpr std::int64_t kMaxSize = 48;
constexpr std::size_t kOperators = 12;
constexpr std::int64_t kCallsPerSet = 200;  // Then other shapes come.

std::int64_t resident_kib() {
  std::ifstream file("/proc/self/statm");
  std::int64_t total = 0;
  std::int64_t resident = 0;
  file >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE) / 1024;
}

// Small integers: exact in any order, different for each rank, call and place.
std::int64_t element_a(std::int64_t rank, std::int64_t call, std::int64_t i, std::int64_t k) {
  return (7 * i + 3 * k + 5 * rank + call) % 9 - 4;
}
std::int64_t element_b(std::int64_t rank, std::int64_t call, std::int64_t j, std::int64_t k) {
  return (2 * j + 5 * k + 3 * rank + call) % 7 - 3;
}

std::int64_t product(std::int64_t rank, std::int64_t call, std::int64_t i, std::int64_t j,
                     std::int64_t depth) {
  std::int64_t sum = 0;
  for (std::int64_t k = 0; k < depth; ++k) sum += element_a(rank, call, i, k) * element_b(rank, call, j, k);
  return sum;
}

enum class Kind { kAllReduce, kReduceScatter, kAllToAll };

/// An operator with what its results must be.
struct Case {
  Kind kind;
  GemmOptions options;
  std::vector<std::vector<std::int32_t>> destinations;  // By rank.
  std::unique_ptr<GemmOperator> op;
};

std::int32_t destination_of(std::int64_t row, std::int64_t rank, std::int64_t salt, int ranks) {
  return static_cast<std::int32_t>((row * row + 3 * rank + salt) % ranks);
}

Case make_case(Context& context, std::mt19937& rng) {
  const int ranks = context.communicator().size();
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
  };
  Case made;
  made.kind = static_cast<Kind>(pick(0, 2));
  made.options.m = pick(0, kMaxSize);
  if (made.kind == Kind::kReduceScatter) made.options.m = made.options.m / ranks * ranks;
  made.options.n = pick(1, kMaxSize);
  made.options.k = pick(1, 12);
  made.options.tile_m = made.options.tile_n = 16;
  const std::int64_t salt = pick(0, 100);
  for (int rank = 0; rank < ranks; ++rank) {
    auto& rows = made.destinations.emplace_back();
    for (std::int64_t row = 0; row < made.options.m; ++row) {
      rows.push_back(destination_of(row, rank, salt, ranks));
    }
  }
  if (made.kind == Kind::kAllReduce) made.op = std::make_unique<GemmAllReduce>(context, made.options);
  if (made.kind == Kind::kReduceScatter) made.op = std::make_unique<GemmReduceScatter>(context, made.options);
  if (made.kind == Kind::kAllToAll) {
    made.op = std::make_unique<GemmAllToAll>(
        context, made.options, made.destinations[static_cast<std::size_t>(context.communicator().rank())]);
  }
  return made;
}

/// The rank (-1: the sum of all) and the row that each output row is.
std::vector<std::pair<int, std::int64_t>> sources(const Case& made, int rank, int ranks) {
  std::vector<std::pair<int, std::int64_t>> rows;
  const std::int64_t share = made.options.m / ranks;
  if (made.kind == Kind::kAllReduce) {
    for (std::int64_t row = 0; row < made.options.m; ++row) rows.emplace_back(-1, row);
  } else if (made.kind == Kind::kReduceScatter) {
    for (std::int64_t row = 0; row < share; ++row) rows.emplace_back(-1, rank * share + row);
  } else {
    for (int source = 0; source < ranks; ++source) {
      for (std::int64_t row = 0; row < made.options.m; ++row) {
        if (made.destinations[static_cast<std::size_t>(source)][static_cast<std::size_t>(row)] == rank) {
          rows.emplace_back(source, row);
        }
      }
    }
  }
  return rows;
}

/// Runs once and compares every element. Throws at the first that is wrong.
void check_call(const Case& made, std::int64_t call, int rank, int ranks) {
  const GemmOptions& options = made.options;
  std::vector<float> a;
  std::vector<float> b;
  for (std::int64_t i = 0; i < options.m; ++i) {
    for (std::int64_t k = 0; k < options.k; ++k) a.push_back(static_cast<float>(element_a(rank, call, i, k)));
  }
  for (std::int64_t j = 0; j < options.n; ++j) {
    for (std::int64_t k = 0; k < options.k; ++k) b.push_back(static_cast<float>(element_b(rank, call, j, k)));
  }
  std::vector<float> out(static_cast<std::size_t>(made.op->output_rows() * options.n), std::nanf(""));
  Operands operands;
  operands.a = a.data();
  operands.lda = options.k;
  operands.b = b.data();
  operands.ldb = options.k;
  operands.out = out.data();
  operands.ldo = options.n;
  (*made.op)(operands);
  const auto rows = sources(made, rank, ranks);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (std::int64_t j = 0; j < options.n; ++j) {
      const auto [source, from] = rows[row];
      std::int64_t expected = 0;
      for (int other = source < 0 ? 0 : source; other <= (source < 0 ? ranks - 1 : source); ++other) {
        expected += product(other, call, from, j, options.k);
      }
      const float value = out[row * static_cast<std::size_t>(options.n) + static_cast<std::size_t>(j)];
      if (value == static_cast<float>(expected)) continue;
      throw std::runtime_error(
          fmt::format("rank {}, call {}: row {} column {} is {}, not {} ({} m={} n={} k={})", rank, call, row,
                      j, value, expected, static_cast<int>(made.kind), options.m, options.n, options.k));
    }
  }
}

void soak(std::int64_t calls, unsigned seed) {
  const auto communicator = make_mpi_communicator();
  const int rank = communicator->rank();
  const int ranks = communicator->size();
  const auto delay = [](std::int64_t) {
    thread_local std::mt19937 rng(std::random_device{}());
    if (rng() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 500));
  };
  Context context(communicator, {.num_threads = 1, .poison_workspace = true, .hooks = {delay, delay}});
  std::mt19937 shapes(seed);  // The same on every rank.
  std::vector<Case> cases;
  std::int64_t early_kib = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t call = 0; call < calls; ++call) {
    if (call % kCallsPerSet == 0) {
      cases.clear();
      for (std::size_t i = 0; i < kOperators; ++i) cases.push_back(make_case(context, shapes));
    }
    check_call(cases[shapes() % cases.size()], call, rank, ranks);
    if (call == calls / 4) early_kib = resident_kib();
  }
  const std::int64_t growth_kib = resident_kib() - early_kib;
  constexpr std::int64_t kAllowedKib = 4096;  // Allocators are not exact.
  if (growth_kib > kAllowedKib) {
    throw std::runtime_error(
        fmt::format("rank {}: memory grew by {} KiB in the last three quarters", rank, growth_kib));
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  fmt::print("rank {}: {} calls exact in {:.1f} s, memory {} KiB, {:+} KiB since call {}\n", rank, calls,
             seconds, resident_kib(), growth_kib, calls / 4);
}

}  // namespace
}  // namespace flashoverlap::test

int main(int argc, char** argv) {
  try {
    flashoverlap::test::soak(argc > 1 ? std::stoll(argv[1]) : 1000,
                             argc > 2 ? static_cast<unsigned>(std::stoul(argv[2])) : 1);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "mpi_soak: {}\n", error.what());
    return 1;
  }
}

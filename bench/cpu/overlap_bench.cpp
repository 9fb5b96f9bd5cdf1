// How much of the possible gain overlap takes on a paced link: GEMM + all-reduce of ranks in this process,
// with a link on which communication takes a given share of the GEMM's time. Serial and overlapped runs are
// interleaved.
//
//   flashoverlap_bench_overlap [ranks] [threads per rank] [rounds]
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/measure.h"
#include "flashoverlap/cpu_executor.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/operators.h"

namespace flashoverlap::bench {
namespace {

struct Setup {
  std::int64_t m = 2048;
  std::int64_t n = 2048;
  std::int64_t k = 2048;
  int ranks = 2;
  int threads = 1;
  int rounds = 9;
};

/// Times of one kind of run, the slowest rank's.
struct Times {
  std::vector<double> serial;
  std::vector<double> overlapped;
  std::vector<double> gemm;
  std::vector<double> communication;
};

std::int64_t waves_of(const Setup& setup) {
  return num_waves({.m = setup.m,
                    .n = setup.n,
                    .k = setup.k,
                    .tile_m = 128,
                    .tile_n = 128,
                    .resources = {.compute_units = setup.threads, .communication_units = 0},
                    .partition = {}});
}

/// Equal groups, then smaller and smaller ones: what remains after the last tile is exposed.
std::vector<std::int64_t> tapered_partition(std::int64_t waves, std::int64_t groups) {
  std::vector<std::int64_t> partition;
  while (waves > 0) {
    const std::int64_t left = std::max<std::int64_t>(1, groups - std::ssize(partition));
    partition.push_back(std::max<std::int64_t>(1, waves / std::max<std::int64_t>(2, left)));
    waves -= partition.back();
  }
  return partition;
}

Times measure(const Setup& setup, const LinkModel& link, const std::vector<std::int64_t>& partition) {
  Times times;
  run_ranks(setup.ranks, {.link = link}, [&](std::shared_ptr<Communicator> communicator) {
    Context context(communicator, ContextOptions{.num_threads = setup.threads});
    GemmAllReduce op(
        context,
        {.m = setup.m, .n = setup.n, .k = setup.k, .tile_m = 128, .tile_n = 128, .partition = partition});
    const auto seed = static_cast<std::uint32_t>(communicator->rank());
    const std::vector<float> a = random_floats(setup.m * setup.k, seed);
    const std::vector<float> b = random_floats(setup.n * setup.k, seed + 100);
    std::vector<float> out(static_cast<std::size_t>(setup.m * setup.n));
    Operands operands;
    operands.a = a.data();
    operands.b = b.data();
    operands.out = out.data();
    operands.lda = operands.ldb = setup.k;
    operands.ldo = setup.n;
    const std::unique_ptr<Stream> stream = communicator->make_stream("bench");
    // All ranks begin together and the time is the slowest rank's: what a model that uses all ranks would
    // see.
    const auto slowest = [&](Method method, Mode mode) {
      communicator->barrier(*stream, {});
      stream->synchronize();
      const double seconds = seconds_of([&] {
        op.run(operands, method, mode, nullptr);
        communicator->barrier(*stream, {});
        stream->synchronize();
      });
      return seconds;
    };
    for (int round = -1; round < setup.rounds; ++round) {
      const double serial = slowest(Method::kSerial, Mode::kRun);
      const double overlapped = slowest(Method::kOverlap, Mode::kRun);
      const double gemm = slowest(Method::kSerial, Mode::kGemmOnly);
      const double communication = slowest(Method::kSerial, Mode::kCommunicationOnly);
      if (round < 0 || communicator->rank() != 0) continue;
      times.serial.push_back(serial);
      times.overlapped.push_back(overlapped);
      times.gemm.push_back(gemm);
      times.communication.push_back(communication);
    }
  });
  return times;
}

void report(double wanted, const LinkModel& link, const std::vector<std::int64_t>& partition,
            const Times& times) {
  const double serial = median(times.serial);
  const double overlapped = median(times.overlapped);
  const double gemm = median(times.gemm);
  const double communication = median(times.communication);
  const double bound = std::max(gemm, communication);
  fmt::print("{:>5.2f} {:>8.4f} {:>8.1f} {:>8.1f} {:>8.1f} {:>10.1f} {:>8.2f} {:>6.2f} {:>8.3f}  {}\n",
             wanted, link.bandwidth_gbps, 1e3 * gemm, 1e3 * communication, 1e3 * serial, 1e3 * overlapped,
             serial / overlapped, (serial - overlapped) / (serial - bound),
             median_ratio(times.overlapped, times.serial), fmt::join(partition, ","));
  std::fflush(stdout);
}

void measure_all(const Setup& setup) {
  const double gemm = median(measure(setup, {}, {}).gemm);
  const double bytes = 4.0 * static_cast<double>(setup.m * setup.n);
  const double wire = 2.0 * (setup.ranks - 1) / setup.ranks * bytes;
  for (const double share : {0.1, 0.5, 1.0, 2.0}) {
    const LinkModel link{.bandwidth_gbps = wire / (share * gemm) / 1e9, .latency_us = 20};
    for (const std::int64_t groups : {8, 16}) {
      const auto partition = tapered_partition(waves_of(setup), groups);
      report(share, link, partition, measure(setup, link, partition));
    }
  }
}

}  // namespace
}  // namespace flashoverlap::bench

int main(int argc, char** argv) {
  flashoverlap::bench::Setup setup;
  if (argc > 1) setup.ranks = std::atoi(argv[1]);
  if (argc > 2) setup.threads = std::atoi(argv[2]);
  if (argc > 3) setup.rounds = std::atoi(argv[3]);
  fmt::print(
      "# {}; gemm-all-reduce m={} n={} k={} float32, {} ranks of {} threads, {} rounds, medians in ms\n",
      flashoverlap::cpu_blas_name(), setup.m, setup.n, setup.k, setup.ranks, setup.threads, setup.rounds);
  fmt::print(
      "# c/g: wanted communication over GEMM time; share: (serial - overlapped) / (serial - max(gemm, "
      "comm));\n"
      "# o/s: median of overlapped over the neighbouring serial run\n");
  fmt::print("{:>5} {:>8} {:>8} {:>8} {:>8} {:>10} {:>8} {:>6} {:>8}  {}\n", "c/g", "GB/s", "gemm", "comm",
             "serial", "overlapped", "speed-up", "share", "o/s", "partition");
  flashoverlap::bench::measure_all(setup);
  return 0;
}

// How long the search and the simulator take. Results are checked against each other before anything is
// timed.
//
//   tune_bench --benchmark_repetitions=5
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <random>

#include "flashoverlap/machine_profile.h"
#include "flashoverlap/partition_search.h"
#include "flashoverlap/plan_builders.h"
#include "flashoverlap/simulator.h"
#include "flashoverlap/tuner.h"

namespace flashoverlap {
namespace {

enum Regime : std::int64_t { kComputeBound, kBalanced, kCommunicationBound };

/// Waves of 60 us and 4 MiB on a curve of 30 points, with transfers that take less, about as much, or more
/// time.
OverlapCost cost_of(std::int64_t waves, Regime regime, bool equal_waves) {
  const double gbps[] = {200, 70, 20};
  std::vector<CurvePoint> points;
  for (double bytes = 1024; bytes < 4e9; bytes *= 1.6) {
    points.push_back({bytes, 20 + bytes / (gbps[regime] * 1e3), 0});
  }
  OverlapCost cost{.finish_us = {}, .bytes = {}, .curve = BandwidthCurve(points, "bench")};
  std::mt19937_64 random(1);
  for (std::int64_t wave = 0; wave < waves; ++wave) {
    cost.finish_us.push_back(60.0 * static_cast<double>(wave + 1));
    cost.bytes.push_back((4 << 20) - (equal_waves ? 0 : static_cast<std::int64_t>(random() % 4096)));
  }
  cost.bytes.back() /= 3;  // the ragged last wave
  return cost;
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "tune_bench: %s\n", what);
  std::abort();
}

void bench_search(benchmark::State& state) {
  const OverlapCost small = cost_of(12, static_cast<Regime>(state.range(1)), state.range(2) != 0);
  require(search_partition(small).partition == search_exhaustively(small).partition, "the searches differ");
  const OverlapCost cost = cost_of(state.range(0), static_cast<Regime>(state.range(1)), state.range(2) != 0);
  for (auto _ : state) benchmark::DoNotOptimize(search_partition(cost));
}
BENCHMARK(bench_search)
    ->ArgNames({"waves", "regime", "equal"})
    ->ArgsProduct({{8, 128, 4096}, {kComputeBound, kBalanced, kCommunicationBound}, {1, 0}})
    ->Unit(benchmark::kMicrosecond);

void bench_exhaustive(benchmark::State& state) {
  const OverlapCost cost = cost_of(state.range(0), kBalanced, true);
  for (auto _ : state) benchmark::DoNotOptimize(search_exhaustively(cost));
}
BENCHMARK(bench_exhaustive)->ArgName("waves")->Arg(8)->Arg(16)->Unit(benchmark::kMicrosecond);

/// An all-reduce plan of 64 waves, one group each: the most transfers that it can have.
void bench_simulate(benchmark::State& state) {
  const MachineProfile machine = load_machine_profile("2x8-h100-infiniband");
  PlanOptions options{.world_size = static_cast<std::int32_t>(state.range(0)),
                      .dtype = DType::kBFloat16,
                      .m = 132 * 128,
                      .n = 64 * 256,
                      .k = 4096,
                      .tile_m = 128,
                      .tile_n = 256,
                      .resources = {.compute_units = 132, .communication_units = 0},
                      .partition = std::vector<std::int64_t>(64, 1)};
  const OverlapPlan plan = plan_all_reduce(options);
  require(plan.num_waves() == 64, "the plan does not have 64 waves");
  for (auto _ : state) benchmark::DoNotOptimize(simulate_symmetric(plan, machine));
}
BENCHMARK(bench_simulate)->ArgName("ranks")->Arg(8)->Arg(64)->Arg(1024)->Unit(benchmark::kMillisecond);

void bench_tune(benchmark::State& state) {
  const MachineProfile machine = load_machine_profile("8x-h200-nvlink");
  TuneRequest request;
  request.world_size = 8;
  request.m = 8192;
  request.n = 8192;
  request.k = 4096;
  request.dtype = DType::kBFloat16;
  for (auto _ : state) benchmark::DoNotOptimize(tune_call(request, machine));
}
BENCHMARK(bench_tune)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace flashoverlap

// What the overlapped path costs the GEMM itself, without communication: tiles through placement and
// counters, and the same tiles without both, against one call of the library on the whole matrix with the
// same threads. Interleaved in one run.
//
//   flashoverlap_bench_gemm [threads] [rounds]
#include <cblas.h>
#include <fmt/core.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cpu/measure.h"
#include "flashoverlap/cpu_executor.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/plan_builders.h"

namespace flashoverlap::bench {
namespace {

struct Shape {
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;
};

struct Matrices {
  explicit Matrices(const Shape& shape)
      : a(random_floats(shape.m * shape.k, 1)),
        b(random_floats(shape.n * shape.k, 2)),
        out(random_floats(shape.m * shape.n, 3)) {}
  std::vector<float> a;
  std::vector<float> b;
  std::vector<float> out;
};

void whole_product(const Shape& shape, Matrices& matrices, int threads) {
  openblas_set_num_threads(threads);
  const auto size = [](std::int64_t value) { return static_cast<blasint>(value); };
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, size(shape.m), size(shape.n), size(shape.k), 1.0F,
              matrices.a.data(), size(shape.k), matrices.b.data(), size(shape.k), 0.0F, matrices.out.data(),
              size(shape.n));
}

/// The plan of rank 0 of 2, so that tiles are packed; nothing is ever sent.
OverlapPlan packed_plan(const Shape& shape, std::int64_t tile_m, std::int64_t tile_n, std::int64_t swizzle,
                        int threads) {
  return plan_all_reduce({.rank = 0,
                          .world_size = 2,
                          .m = shape.m,
                          .n = shape.n,
                          .k = shape.k,
                          .tile_m = tile_m,
                          .tile_n = tile_n,
                          .swizzle = swizzle,
                          .resources = {.compute_units = threads, .communication_units = 0},
                          .partition = {}});
}

void measure_shape(const Shape& shape, int threads, int rounds) {
  Matrices matrices(shape);
  const auto communicators = make_in_process_communicators(2);
  const auto executor = make_cpu_executor(communicators[0], {.num_threads = threads});
  Operands operands;
  operands.a = matrices.a.data();
  operands.b = matrices.b.data();
  operands.out = matrices.out.data();
  operands.lda = operands.ldb = shape.k;
  operands.ldo = shape.n;
  const struct {
    std::int64_t tile_m;
    std::int64_t tile_n;
    std::int64_t swizzle;
  } configurations[] = {{128, 128, 1}, {128, 128, 4}, {256, 128, 1},
                        {256, 256, 1}, {256, 256, 2}, {512, 256, 1}};
  for (const auto& c : configurations) {
    const auto prepared = executor->prepare(packed_plan(shape, c.tile_m, c.tile_n, c.swizzle, threads));
    const auto run = [&](Mode mode) { executor->execute(*prepared, operands, mode, nullptr); };
    std::vector<double> whole;
    std::vector<double> packed;
    std::vector<double> plain;
    for (int round = -1; round < rounds; ++round) {  // round -1 warms up
      const double whole_s = seconds_of([&] { whole_product(shape, matrices, threads); });
      const double packed_s = seconds_of([&] { run(Mode::kGemmOnly); });
      const double plain_s = seconds_of([&] { run(Mode::kPlainGemm); });
      if (round < 0) continue;
      whole.push_back(whole_s);
      packed.push_back(packed_s);
      plain.push_back(plain_s);
    }
    const double flops =
        2.0 * static_cast<double>(shape.m) * static_cast<double>(shape.n) * static_cast<double>(shape.k);
    fmt::print("{:>5} {:>5} {:>5} {:>9} {:>7} {:>10.1f} {:>10.1f} {:>10.3f} {:>13.3f}\n", shape.m, shape.n,
               shape.k, fmt::format("{}x{}", c.tile_m, c.tile_n), c.swizzle, 1e3 * median(whole),
               flops / median(whole) / 1e9, median_ratio(packed, whole), median_ratio(packed, plain));
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace flashoverlap::bench

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
  fmt::print("# {}; {} threads, {} rounds, float32; medians of ratios of neighbouring runs\n",
             flashoverlap::cpu_blas_name(), threads, rounds);
  fmt::print(
      "# tiles/whole: tiles, placement and counters against one library call; signals: the same tiles with "
      "placement\n"
      "# and counters against without\n");
  fmt::print("{:>5} {:>5} {:>5} {:>9} {:>7} {:>10} {:>10} {:>10} {:>13}\n", "m", "n", "k", "tile", "swizzle",
             "whole ms", "GFLOP/s", "tiles/whole", "signals");
  for (const auto& shape :
       {flashoverlap::bench::Shape{2048, 2048, 2048}, flashoverlap::bench::Shape{4096, 1024, 4096}}) {
    flashoverlap::bench::measure_shape(shape, threads, rounds);
  }
  return 0;
}

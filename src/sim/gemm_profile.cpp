#include "flashoverlap/gemm_profile.h"

#include <algorithm>
#include <cmath>

#include "core/fail.h"
#include "flashoverlap/error.h"

namespace flashoverlap {
namespace {

constexpr double kFlopPerUsAtOneGflops = 1e3;

std::string describe(const GemmKernel& kernel) {
  return fmt::format("{} {}x{}", name_of(kernel.dtype), kernel.tile_m, kernel.tile_n);
}

double ceil_div(std::int64_t a, std::int64_t b) {
  const std::int64_t quotient = (a + b - 1) / b;
  return static_cast<double>(quotient);
}

void check_sample(const GemmSample& sample, const GemmSample& first) {
  if (sample.m < 1 || sample.n < 1 || sample.k < 1 || sample.tile_m < 1 || sample.tile_n < 1 ||
      sample.units < 1 || !(sample.duration_us > 0 && std::isfinite(sample.duration_us))) {
    core::fail(ErrorKind::kBadArgument,
               "GEMM sample m={} n={} k={} tile {}x{} units={} duration={} us: all of them must be positive",
               sample.m, sample.n, sample.k, sample.tile_m, sample.tile_n, sample.units, sample.duration_us);
  }
  if (sample.dtype != first.dtype || sample.tile_m != first.tile_m || sample.tile_n != first.tile_n) {
    core::fail(ErrorKind::kBadArgument,
               "GEMM samples of {} {}x{} and {} {}x{} cannot be fitted to one kernel", name_of(first.dtype),
               first.tile_m, first.tile_n, name_of(sample.dtype), sample.tile_m, sample.tile_n);
  }
}

/// duration - launch = tiles * overhead + flop * us_per_flop, per unit: what a sample says about the two
/// unknowns. Whole waves for padded tiles; for proportional ones the mean load of a unit would do, but the
/// slowest unit decides, so waves too.
struct Equation {
  double tiles = 0;
  double flop = 0;
  double time_us = 0;
};

Equation equation(const GemmSample& sample, double launch_us, RaggedTiles ragged) {
  const double tiles = ceil_div(sample.m, sample.tile_m) * ceil_div(sample.n, sample.tile_n);
  const double waves = std::ceil(tiles / static_cast<double>(sample.units));
  double area = static_cast<double>(sample.tile_m) * static_cast<double>(sample.tile_n);
  if (ragged == RaggedTiles::kProportional) {
    area = static_cast<double>(sample.m) * static_cast<double>(sample.n) / tiles;
  }
  return {waves, waves * 2 * area * static_cast<double>(sample.k), sample.duration_us - launch_us};
}

}  // namespace

double GemmKernel::tile_us(std::int64_t rows, std::int64_t cols, std::int64_t k) const {
  const std::int64_t charged_rows = ragged == RaggedTiles::kPadded ? tile_m : rows;
  const std::int64_t charged_cols = ragged == RaggedTiles::kPadded ? tile_n : cols;
  const double flop =
      2 * static_cast<double>(charged_rows) * static_cast<double>(charged_cols) * static_cast<double>(k);
  return overhead_us + flop / (unit_gflops * kFlopPerUsAtOneGflops);
}

GemmKernel GemmProfile::kernel(DType dtype, std::int64_t tile_m, std::int64_t tile_n) const {
  const GemmKernel* nearest = nullptr;
  double nearest_distance = 0;
  const double area = static_cast<double>(tile_m) * static_cast<double>(tile_n);
  for (const GemmKernel& candidate : kernels) {
    if (candidate.dtype != dtype) continue;
    if (candidate.tile_m == tile_m && candidate.tile_n == tile_n) return candidate;
    const double candidate_area =
        static_cast<double>(candidate.tile_m) * static_cast<double>(candidate.tile_n);
    const double distance = std::abs(std::log(candidate_area / area));
    if (nearest == nullptr || distance < nearest_distance) {
      nearest = &candidate;
      nearest_distance = distance;
    }
  }
  if (nearest == nullptr) {
    std::string have;
    for (const GemmKernel& candidate : kernels) have += (have.empty() ? "" : ", ") + describe(candidate);
    core::fail(ErrorKind::kBadArgument, "the machine profile has no {} GEMM kernel; it has: {}",
               name_of(dtype), have.empty() ? "none" : have);
  }
  GemmKernel kernel = *nearest;
  kernel.source = fmt::format("rate of {}: {}", describe(*nearest), nearest->source);
  kernel.tile_m = tile_m;
  kernel.tile_n = tile_n;
  return kernel;
}

std::int64_t GemmProfile::compute_units(DType dtype, std::int64_t tile_m, std::int64_t tile_n,
                                        std::int64_t units) const {
  return std::max<std::int64_t>(1, units / kernel(dtype, tile_m, tile_n).units_per_tile);
}

std::optional<double> GemmProfile::measured_us(const GemmSample& call) const {
  for (const GemmSample& sample : samples) {
    if (sample.m == call.m && sample.n == call.n && sample.k == call.k && sample.dtype == call.dtype &&
        sample.tile_m == call.tile_m && sample.tile_n == call.tile_n && sample.units == call.units) {
      return sample.duration_us;
    }
  }
  return std::nullopt;
}

GemmKernel fit_gemm_kernel(std::span<const GemmSample> samples, double launch_us, RaggedTiles ragged) {
  if (samples.empty())
    core::fail(ErrorKind::kBadArgument, "no GEMM samples to fit a kernel to, at least one is needed");
  if (!(launch_us >= 0 && std::isfinite(launch_us))) {
    core::fail(ErrorKind::kBadArgument, "GEMM launch time is {} us, must be finite and >= 0", launch_us);
  }
  // Weighted normal equations of x * tiles + y * flop = time, weight 1 / time^2.
  double tt = 0;
  double tf = 0;
  double ff = 0;
  double t = 0;
  double f = 0;
  for (const GemmSample& sample : samples) {
    check_sample(sample, samples.front());
    const Equation e = equation(sample, launch_us, ragged);
    if (e.time_us <= 0) continue;
    const double tiles = e.tiles / e.time_us;
    const double flop = e.flop / e.time_us;
    tt += tiles * tiles;
    tf += tiles * flop;
    ff += flop * flop;
    t += tiles;
    f += flop;
  }
  if (ff == 0) {
    core::fail(ErrorKind::kBadArgument, "no GEMM sample takes longer than the launch time of {} us",
               launch_us);
  }
  const double determinant = tt * ff - tf * tf;
  double overhead_us = 0;
  double us_per_flop = f / ff;
  if (determinant > 1e-9 * tt * ff) {  // otherwise all samples have about the same work per tile
    const double x = (t * ff - f * tf) / determinant;
    const double y = (f * tt - t * tf) / determinant;
    if (x > 0 && y > 0) {
      overhead_us = x;
      us_per_flop = y;
    }
  }
  GemmKernel kernel;
  kernel.dtype = samples.front().dtype;
  kernel.tile_m = samples.front().tile_m;
  kernel.tile_n = samples.front().tile_n;
  kernel.overhead_us = overhead_us;
  kernel.unit_gflops = 1 / (us_per_flop * kFlopPerUsAtOneGflops);
  kernel.ragged = ragged;
  kernel.source = fmt::format("fitted to {} measured GEMMs", samples.size());
  return kernel;
}

}  // namespace flashoverlap

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flashoverlap/dtype.h"

/// How long GEMMs take on one device: the compute half of a machine profile.
namespace flashoverlap {

/// What a tile at the edge of the matrix costs.
enum class RaggedTiles {
  kPadded,        ///< As much as a whole tile: GPU kernels compute the padding too.
  kProportional,  ///< As much as its own rows and columns need: a CPU's BLAS.
};

/// One unit computing one tile: time = overhead_us + 2 * rows * cols * k / unit_gflops.
/// A persistent GEMM's duration follows: launch + (waves) * (tile time); see docs/machine-profile.md for how
/// well that fits.
struct GemmKernel {
  DType dtype = DType::kFloat32;
  std::int64_t tile_m = 128;
  std::int64_t tile_n = 128;
  double overhead_us = 0;  ///< Prologue, epilogue and store of one tile, >= 0.
  double unit_gflops = 0;  ///< 1e9 floating-point operations a second of one unit in the main loop, > 0.
  RaggedTiles ragged = RaggedTiles::kPadded;
  std::string source;  ///< Where the numbers come from.

  /// Of a tile of rows x cols elements, sum over k.
  [[nodiscard]] double tile_us(std::int64_t rows, std::int64_t cols, std::int64_t k) const;
  bool operator==(const GemmKernel&) const = default;
};

/// One measured GEMM, D[m, n] from A[m, k] and B[n, k], without communication beside it.
struct GemmSample {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  DType dtype = DType::kFloat32;
  std::int64_t tile_m = 0;
  std::int64_t tile_n = 0;
  std::int64_t units = 0;  ///< Units that computed.
  double duration_us = 0;  ///< Median, > 0.
  double spread_us = 0;    ///< Half the distance between the quartiles; 0: not known.
  bool operator==(const GemmSample&) const = default;
};

struct GemmProfile {
  double launch_us = 0;             ///< From the call to the start of the first tile.
  std::vector<GemmKernel> kernels;  ///< At most one per dtype and tile.
  std::vector<GemmSample>
      samples;  ///< Durations of whole calls: they win over the model where they fit exactly.

  /// The kernel of this type and tile; without it the one of this type nearest in tile area, with its tile
  /// size replaced and `source` saying so. Throws Error(kBadArgument) listing the kernels when there is none
  /// of this type.
  [[nodiscard]] GemmKernel kernel(DType dtype, std::int64_t tile_m, std::int64_t tile_n) const;

  /// The measured duration of exactly this call, if there is one.
  [[nodiscard]] std::optional<double> measured_us(const GemmSample& call) const;
  bool operator==(const GemmProfile&) const = default;
};

/// Fits overhead_us and unit_gflops to samples of one dtype and tile by least squares of the relative error,
/// with overhead_us >= 0. One sample, or samples of one k only, give overhead_us = 0. Throws
/// Error(kBadArgument) without samples, for samples of different dtype or tile, for a sample that names a
/// non-positive size or duration, or when all durations are at or below the launch time.
[[nodiscard]] GemmKernel fit_gemm_kernel(std::span<const GemmSample> samples, double launch_us,
                                         RaggedTiles ragged);

}  // namespace flashoverlap

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

/// One compute unit of a plan computing one tile: time = overhead_us + 2 * rows * cols * k / unit_gflops.
/// A persistent GEMM's duration follows: launch + (waves) * (tile time); see docs/machine-profile.md for how
/// well that fits.
struct GemmKernel {
  DType dtype = DType::kFloat32;
  std::int64_t tile_m = 128;
  std::int64_t tile_n = 128;
  double overhead_us = 0;  ///< Prologue, epilogue and store of one tile, >= 0.
  double unit_gflops = 0;  ///< 1e9 floating-point operations a second of one such unit in the main loop, > 0.
  RaggedTiles ragged = RaggedTiles::kPadded;
  std::string source;  ///< Where the numbers come from.
  /// How many of the machine's units compute a tile together, >= 1: the SMs of a GPU's cluster. A plan's
  /// compute unit then is so many of them; `MachineProfile::units` and communication units count SMs.
  std::int64_t units_per_tile = 1;

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
  std::int64_t units = 0;  ///< Compute units, as plans count them: tiles that were computed at a time.
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

  /// Compute units of a plan with such tiles where `units` of the machine's compute: as many as have
  /// units_per_tile of the kernel's each, at least 1. Throws as `kernel`.
  [[nodiscard]] std::int64_t compute_units(DType dtype, std::int64_t tile_m, std::int64_t tile_n,
                                           std::int64_t units) const;

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

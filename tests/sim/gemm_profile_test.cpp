#include "flashoverlap/gemm_profile.h"

#include <gtest/gtest.h>

#include "support/throws.h"

namespace flashoverlap {
namespace {

GemmKernel kernel(DType dtype, std::int64_t tile_m, std::int64_t tile_n, RaggedTiles ragged) {
  return {dtype, tile_m, tile_n, 2, 1000, ragged, "test"};
}

GemmSample sample(std::int64_t m, std::int64_t n, std::int64_t k, double duration_us) {
  return {m, n, k, DType::kFloat32, 128, 128, 4, duration_us, 0};
}

TEST(GemmKernel, TileTimeIsOverheadPlusWork) {
  const double full = 2 + 2.0 * 128 * 128 * 1000 / 1e6;
  EXPECT_DOUBLE_EQ(kernel(DType::kFloat32, 128, 128, RaggedTiles::kPadded).tile_us(128, 128, 1000), full);
  EXPECT_DOUBLE_EQ(kernel(DType::kFloat32, 128, 128, RaggedTiles::kPadded).tile_us(1, 7, 1000), full);
  EXPECT_DOUBLE_EQ(kernel(DType::kFloat32, 128, 128, RaggedTiles::kProportional).tile_us(64, 32, 1000),
                   2 + 2.0 * 64 * 32 * 1000 / 1e6);
}

TEST(GemmProfile, TheNearestTileStandsInForAMissingOne) {
  GemmProfile profile;
  profile.kernels = {kernel(DType::kFloat32, 64, 64, RaggedTiles::kPadded),
                     kernel(DType::kFloat32, 256, 256, RaggedTiles::kPadded)};
  profile.kernels[1].unit_gflops = 3000;
  EXPECT_EQ(profile.kernel(DType::kFloat32, 64, 64), profile.kernels[0]);
  const GemmKernel near = profile.kernel(DType::kFloat32, 256, 192);
  EXPECT_EQ(near.unit_gflops, 3000);
  EXPECT_EQ(near.tile_n, 192);
  EXPECT_EQ(near.source, "rate of f32 256x256: test");
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "no bf16 GEMM kernel; it has: f32 64x64, f32 256x256",
                            static_cast<void>(profile.kernel(DType::kBFloat16, 64, 64)));
}

TEST(GemmProfile, AComputeUnitHasAsManyUnitsAsComputeATileTogether) {
  GemmProfile profile;
  profile.kernels = {kernel(DType::kBFloat16, 256, 192, RaggedTiles::kPadded),
                     kernel(DType::kFloat32, 64, 64, RaggedTiles::kPadded)};
  profile.kernels[0].units_per_tile = 2;
  EXPECT_EQ(profile.compute_units(DType::kBFloat16, 256, 192, 132), 66);
  EXPECT_EQ(profile.compute_units(DType::kBFloat16, 256, 192, 117), 58);  // one is left over
  EXPECT_EQ(profile.compute_units(DType::kBFloat16, 256, 192, 1), 1);
  EXPECT_EQ(profile.compute_units(DType::kBFloat16, 128, 128, 132), 66);  // as the kernel that stands in
  EXPECT_EQ(profile.compute_units(DType::kFloat32, 64, 64, 132), 132);
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "no f16 GEMM kernel",
                            static_cast<void>(profile.compute_units(DType::kFloat16, 64, 64, 8)));
}

TEST(GemmProfile, MeasuredCallsAreFoundExactly) {
  GemmProfile profile;
  profile.samples = {sample(256, 256, 64, 77)};
  EXPECT_EQ(profile.measured_us(sample(256, 256, 64, 0)), 77);
  EXPECT_EQ(profile.measured_us(sample(256, 256, 65, 0)), std::nullopt);
}

TEST(FitGemmKernel, FindsTheNumbersThatMadeTheSamples) {
  constexpr double kLaunch = 5;
  std::vector<GemmSample> samples;
  for (const std::int64_t k : {64, 256, 1000, 4000}) {
    for (const std::int64_t m : {512, 640, 2048}) {
      const double waves = static_cast<double>((m / 128 * 4 + 3) / 4);
      samples.push_back(
          sample(m, 512, k, kLaunch + waves * (3 + 2.0 * 128 * 128 * static_cast<double>(k) / 50e3)));
    }
  }
  const GemmKernel fitted = fit_gemm_kernel(samples, kLaunch, RaggedTiles::kPadded);
  EXPECT_NEAR(fitted.overhead_us, 3, 1e-6);
  EXPECT_NEAR(fitted.unit_gflops, 50, 1e-6);
  EXPECT_EQ(fitted.source, "fitted to 12 measured GEMMs");
}

TEST(FitGemmKernel, OneSampleGivesARateOnly) {
  const GemmKernel fitted = fit_gemm_kernel(std::vector{sample(128, 512, 100, 2.0 * 128 * 128 * 100 / 1e3)},
                                            0, RaggedTiles::kPadded);
  EXPECT_EQ(fitted.overhead_us, 0);
  EXPECT_NEAR(fitted.unit_gflops, 1, 1e-9);
}

TEST(FitGemmKernel, BadSamplesAreNamed) {
  const auto kind = ErrorKind::kBadArgument;
  const auto fit = [](std::vector<GemmSample> samples, double launch) {
    static_cast<void>(fit_gemm_kernel(samples, launch, RaggedTiles::kPadded));
  };
  FLASHOVERLAP_EXPECT_THROW(kind, "no GEMM samples", fit({}, 0));
  FLASHOVERLAP_EXPECT_THROW(kind, "launch time is -1 us", fit({sample(1, 1, 1, 1)}, -1));
  FLASHOVERLAP_EXPECT_THROW(kind, "m=0", fit({sample(0, 1, 1, 1)}, 0));
  FLASHOVERLAP_EXPECT_THROW(kind, "duration=0 us", fit({sample(1, 1, 1, 0)}, 0));
  FLASHOVERLAP_EXPECT_THROW(kind, "takes longer than the launch time of 9 us", fit({sample(1, 1, 1, 5)}, 9));
  GemmSample other = sample(1, 1, 1, 5);
  other.tile_m = 64;
  FLASHOVERLAP_EXPECT_THROW(kind, "f32 128x128 and f32 64x128 cannot be fitted",
                            fit({sample(1, 1, 1, 5), other}, 0));
}

}  // namespace
}  // namespace flashoverlap

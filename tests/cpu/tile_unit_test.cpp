// One tile: the same bits wherever it is written, offsets beyond 32 bits, and the library behind it.
#include "cpu/tile_unit.h"

#include <cblas.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <limits>
#include <thread>
#include <vector>

#include "core/half.h"
#include "cpu/blas.h"
#include "cpu/epilogue.h"
#include "flashoverlap/plan_builders.h"
#include "support/matrix.h"
#include "support/seed.h"

namespace flashoverlap::test {
namespace {

class TileUnitTest : public SeededTest {};

cpu::CpuPreparedPlan plan_of(std::int64_t rows, std::int64_t cols, std::int64_t k, DType dtype) {
  PlanOptions options;
  options.dtype = dtype;
  options.m = rows;
  options.n = cols;
  options.k = k;
  options.tile_m = std::max<std::int64_t>(1, rows);
  options.tile_n = std::max<std::int64_t>(1, cols);
  return cpu::CpuPreparedPlan(plan_all_reduce(options));
}

cpu::TileInputs inputs_of(const Matrix& a, const Matrix& b) {
  return {a.data(), a.ld(), b.data(), b.ld()};
}

TEST_F(TileUnitTest, SameBitsWhereverItIsWritten) {
  for (int round = 0; round < 60; ++round) {
    const auto dtype = static_cast<DType>(pick(0, 2));
    const std::int64_t rows = pick(1, 140);
    const std::int64_t cols = pick(1, 140);
    const std::int64_t k = pick(0, 3) == 0 ? pick(0, 3) : pick(1, 900);
    const cpu::CpuPreparedPlan prepared = plan_of(rows, cols, k, dtype);
    std::vector<std::byte> scratch(static_cast<std::size_t>(cpu::TileUnit::scratch_bytes(prepared)));
    cpu::TileUnit unit(prepared, scratch.data());
    Matrix a(rows, k, dtype, k + pick(0, 5));
    Matrix b(cols, k, dtype, k + pick(0, 5));
    std::uniform_real_distribution<float> uniform(-1, 1);
    a.fill([&](auto, auto) { return uniform(rng_); });
    b.fill([&](auto, auto) { return uniform(rng_); });
    const Tile tile{.problem = 0, .row_begin = 0, .rows = rows, .col_begin = 0, .cols = cols};
    const auto nothing = [](float*) {};

    Matrix dense(rows, cols, dtype);
    Matrix strided(rows, cols, dtype, cols + 7);
    Matrix finished(rows, cols, dtype);
    Matrix packed(rows, cols, dtype);
    Matrix pieces(rows, cols, dtype);
    unit.run(tile, inputs_of(a, b), {{}, nullptr, dense.data(), dense.ld()}, false, nothing);
    unit.run(tile, inputs_of(a, b), {{}, nullptr, strided.data(), strided.ld()}, false, nothing);
    unit.run(tile, inputs_of(a, b), {{}, nullptr, finished.data(), finished.ld()}, true, nothing);
    const PlacementSegment whole{0, rows, 0};
    unit.run(tile, inputs_of(a, b), {{&whole, 1}, packed.data(), nullptr, 0}, false, nothing);
    const std::int64_t cut = pick(0, rows - 1);
    std::vector<PlacementSegment> cuts = {{0, cut, 0}, {cut, rows - cut, cut * cols}};
    if (cut == 0) cuts.erase(cuts.begin());
    unit.run(tile, inputs_of(a, b), {cuts, pieces.data(), nullptr, 0}, false, nothing);

    EXPECT_TRUE(dense == packed) << rows << "x" << cols << "x" << k;
    EXPECT_TRUE(dense == pieces) << rows << "x" << cols << "x" << k;
    EXPECT_TRUE(dense == finished) << rows << "x" << cols << "x" << k;
    EXPECT_TRUE(strided.guards_intact());
    EXPECT_TRUE(dense.guards_intact());
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) ASSERT_EQ(strided.at(i, j), dense.at(i, j));
    }
  }
}

/// Address space without memory behind it but where it is touched.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                   0)) {}
  ~SparseMemory() { munmap(data_, bytes_); }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  [[nodiscard]] std::byte* data() const {
    return data_ == MAP_FAILED ? nullptr : static_cast<std::byte*>(data_);
  }

 private:
  std::size_t bytes_;
  void* data_;
};

// B13: row 524288 of a matrix with rows of 4096 begins at element 2^31, byte 2^32 in float16.
TEST_F(TileUnitTest, OffsetsBeyond32Bits) {
  constexpr std::int64_t kRow = 524'288;
  constexpr std::int64_t kWidth = 4096;
  constexpr std::int64_t kByte = 4'294'967'296;
  const SparseMemory a(static_cast<std::size_t>(kByte + 2 * kWidth));
  const SparseMemory out(static_cast<std::size_t>(kByte + 2 * kWidth));
  ASSERT_NE(a.data(), nullptr);
  ASSERT_NE(out.data(), nullptr);
  const float three = 3;
  core::from_float(&three, DType::kFloat16, a.data() + kByte, 1);
  Matrix b(1, 1, DType::kFloat16);
  b.set(0, 0, 5);
  const cpu::CpuPreparedPlan prepared = plan_of(1, 1, 1, DType::kFloat16);
  std::vector<std::byte> scratch(static_cast<std::size_t>(cpu::TileUnit::scratch_bytes(prepared)));
  cpu::TileUnit unit(prepared, scratch.data());
  const Tile tile{.problem = 0, .row_begin = kRow, .rows = 1, .col_begin = 0, .cols = 1};
  unit.run(tile, {a.data(), kWidth, b.data(), 1}, {{}, nullptr, out.data(), kWidth}, false, [](float*) {});
  float result = 0;
  core::to_float(out.data() + kByte, DType::kFloat16, &result, 1);
  EXPECT_EQ(result, 15);
  // The same through the packed buffer.
  const PlacementSegment segment{0, 1, kRow * kWidth};
  unit.run(tile, {a.data(), kWidth, b.data(), 1}, {{&segment, 1}, out.data(), nullptr, 0}, true,
           [](float* accumulator) { *accumulator += 1; });
  core::to_float(out.data() + kByte, DType::kFloat16, &result, 1);
  EXPECT_EQ(result, 16);
}

TEST(Blas, ThreadCountComesBack) {
  openblas_set_num_threads(2);
  const int before = openblas_get_num_threads();
  {
    const cpu::SingleThreadedBlas outer;
    EXPECT_EQ(openblas_get_num_threads(), 1);
    { const cpu::SingleThreadedBlas inner; }
    EXPECT_EQ(openblas_get_num_threads(), 1) << "a run elsewhere is still in progress";
  }
  EXPECT_EQ(openblas_get_num_threads(), before);
}

// More threads than OpenBLAS has buffers: it would warn, and with some more fail.
TEST(Blas, ManyMoreThreadsThanBuffers) {
  constexpr int kThreads = 300;
  const cpu::SingleThreadedBlas single_threaded;
  const std::vector<float> ones(64 * 64, 1);
  std::vector<std::vector<float>> results(kThreads, std::vector<float>(64 * 64));
  std::vector<std::thread> threads;
  for (auto& result : results) {
    threads.emplace_back(
        [&] { cpu::gemm(64, 64, 64, ones.data(), 64, ones.data(), 64, false, result.data(), 64); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, std::vector<float>(64 * 64, 64));
}

TEST(Activations, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {-2, 0, 3, infinity, std::numeric_limits<float>::quiet_NaN()};
  cpu::activate(Activation::kRelu, values.data(), std::ssize(values));
  EXPECT_EQ(values[0], 0);
  EXPECT_EQ(values[2], 3);
  EXPECT_EQ(values[3], infinity);
  EXPECT_TRUE(std::isnan(values[4])) << "a NaN must not be hidden";
  std::vector<float> silu = {-1000, 0, 1000};
  cpu::activate(Activation::kSilu, silu.data(), 3);
  EXPECT_EQ(silu, (std::vector<float>{-0.0F, 0, 1000}));
  std::vector<float> gelu = {-1000, 0, 1000};
  cpu::activate(Activation::kGelu, gelu.data(), 3);
  EXPECT_EQ(gelu, (std::vector<float>{-0.0F, 0, 1000}));
  EXPECT_EQ(name_of(Activation::kGelu), "gelu");
}

}  // namespace
}  // namespace flashoverlap::test

// The restore kernels against the formula in float64, over random bands and pieces, aligned and not.
#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

#include "check.h"
#include "core/half.h"
#include "cuda_stream.h"
#include "device_plan.h"
#include "flashoverlap/plan_builders.h"
#include "gemm_reference.h"
#include "gpu_test.h"
#include "restore.h"

namespace flashoverlap::gpu_test {
namespace {

using Random = std::mt19937_64;

std::int64_t uniform(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

// 16-bit elements of a type, on the host.
struct Codec {
  DType dtype;
  [[nodiscard]] double decode(std::uint16_t bits) const {
    float value = 0;
    core::to_float(&bits, dtype, &value, 1);
    return value;
  }
  [[nodiscard]] std::uint16_t encode(double value) const {
    const auto narrow = static_cast<float>(value);
    std::uint16_t bits = 0;
    core::from_float(&narrow, dtype, &bits, 1);
    return bits;
  }
  // Half a unit in the last place, relative.
  [[nodiscard]] double epsilon() const { return dtype == DType::kBFloat16 ? 1.0 / 256 : 1.0 / 2048; }
};

std::vector<std::uint16_t> random_values(const Codec& codec, std::int64_t count, Random& random) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  std::uniform_real_distribution<double> real(-2.0, 2.0);
  for (std::uint16_t& value : values) value = codec.encode(real(random));
  return values;
}

struct Operands {
  std::int64_t rows, n, ldr, ldh, ldo;
  std::vector<std::vector<std::uint16_t>> sources;  // an element is their sum
  std::vector<std::uint16_t> bias, residual, weight;
};

double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    case Activation::kGelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
  }
  return x;
}

// Where element (row, col) of the output lies in the source.
std::int64_t source_index(const OverlapPlan& plan, std::int64_t row, std::int64_t col) {
  for (const RestoreBand& band : plan.restore.bands) {
    if (row >= band.row_begin + band.rows) continue;
    for (const RestorePiece& piece : plan.restore.of_band(band)) {
      if (col < piece.col_begin + piece.cols)
        return piece.offset + (row - band.row_begin) * piece.cols + col - piece.col_begin;
    }
  }
  return row * plan.output_cols + col;  // no bands: in its place
}

struct Steps {
  bool bias, residual, residual_out, norm;
  Activation activation;
};

// num_sums: partial sums; 0: one source, as when a collective has added them.
void run_case(DType dtype, const PlanOptions& options, int kind, const Steps& steps, int misalign,
              int num_sums, Random& random) {
  const Codec codec{dtype};
  OverlapPlan plan;
  if (kind == 0) plan = plan_all_reduce(options);
  if (kind == 1) plan = plan_reduce_scatter(options, RowOwnership::kContiguous);
  if (kind == 2) plan = plan_reduce_scatter(options, RowOwnership::kBlockCyclic);
  const std::int64_t rows = plan.output_rows;
  const std::int64_t n = plan.output_cols;
  if (rows == 0) return;
  const std::int64_t source_size = std::max({plan.packed_size, plan.received_size, rows * n});
  std::vector<std::vector<std::uint16_t>> sources;
  for (int s = 0; s < std::max(1, num_sums); ++s)
    sources.push_back(random_values(codec, source_size, random));
  const Operands host{rows,
                      n,
                      n + misalign,
                      n + 2 * misalign,
                      n + 3 * misalign,
                      std::move(sources),
                      random_values(codec, n, random),
                      random_values(codec, rows * (n + misalign), random),
                      random_values(codec, n, random)};
  const cuda::HostTables tables = cuda::make_host_tables(plan);
  const cuda::DeviceBuffer pieces = device_copy(tables.pieces);
  const cuda::DeviceBuffer device_rows = device_copy(tables.rows);
  std::vector<cuda::DeviceBuffer> device_sources;
  for (const auto& source : host.sources) device_sources.push_back(device_copy(source));
  const cuda::DeviceBuffer bias = device_copy(host.bias);
  const cuda::DeviceBuffer residual = device_copy(host.residual);
  const cuda::DeviceBuffer weight = device_copy(host.weight);
  constexpr std::int64_t kGuard = 64;
  const std::vector<std::uint16_t> poison(static_cast<std::size_t>(rows * (n + 3 * misalign) + kGuard),
                                          kPoison);
  const cuda::DeviceBuffer out = device_copy(poison);
  const cuda::DeviceBuffer residual_out = device_copy(poison);
  cuda::RestoreParams params;
  params.dtype = dtype;
  params.rows = rows;
  params.n = n;
  params.source = device_sources.front().data();
  params.source_ld = n;
  params.sums.count = num_sums;
  for (int s = 0; s < num_sums; ++s)
    params.sums.sources[s] = device_sources[static_cast<std::size_t>(s)].data();
  params.restore = {.rows = static_cast<const cuda::DeviceRow*>(device_rows.data()),
                    .pieces = static_cast<const cuda::DevicePiece*>(pieces.data()),
                    .piece_cols = tables.piece_cols,
                    .is_aligned = tables.is_restore_aligned};
  params.out = out.data();
  params.ldo = host.ldo;
  params.epilogue = {.bias = steps.bias ? bias.data() : nullptr,
                     .activation = steps.activation,
                     .residual = steps.residual ? residual.data() : nullptr,
                     .residual_ld = host.ldr,
                     .residual_out = steps.residual_out ? residual_out.data() : nullptr,
                     .residual_out_ld = host.ldh,
                     .rms_norm_weight = steps.norm ? weight.data() : nullptr};
  cuda::launch_restore(params, nullptr);
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  const std::vector<std::uint16_t> got = host_copy<std::uint16_t>(out);
  const std::vector<std::uint16_t> got_h = host_copy<std::uint16_t>(residual_out);
  std::ostringstream what;
  what << "kind " << kind << ", " << rows << " x " << n << ", tile " << options.tile_m << " x "
       << options.tile_n << ", misalign " << misalign << ", " << num_sums << " partial sums, norm "
       << steps.norm << ", activation " << static_cast<int>(steps.activation) << ", type " << name_of(dtype);
  std::vector<double> h(static_cast<std::size_t>(n));
  for (std::int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (std::int64_t col = 0; col < n; ++col) {
      const auto at = static_cast<std::size_t>(col);
      double x = 0;
      for (const auto& source : host.sources)
        x += codec.decode(source[static_cast<std::size_t>(source_index(plan, row, col))]);
      if (steps.bias) x += codec.decode(host.bias[at]);
      x = activated(steps.activation, x);
      if (steps.residual) x += codec.decode(host.residual[static_cast<std::size_t>(row * host.ldr + col)]);
      h[at] = x;
      squares += x * x;
    }
    const double scale = steps.norm ? 1 / std::sqrt(squares / static_cast<double>(n) + 1e-6) : 1;
    for (std::int64_t col = 0; col < n; ++col) {
      const auto at = static_cast<std::size_t>(col);
      const double expected = h[at] * scale * (steps.norm ? codec.decode(host.weight[at]) : 1);
      // Rounding to the type, and a little for float32 and the fast exponential.
      const auto close = [&](double value, double exact) {
        return std::abs(value - exact) <= 1.02 * codec.epsilon() * std::abs(exact) + 1e-5;
      };
      const double value = codec.decode(got[static_cast<std::size_t>(row * host.ldo + col)]);
      GPU_EXPECT(close(value, expected), what.str() << ": out[" << row << ", " << col << "] = " << value
                                                    << ", expected " << expected);
      if (steps.residual_out) {
        const double value_h = codec.decode(got_h[static_cast<std::size_t>(row * host.ldh + col)]);
        GPU_EXPECT(close(value_h, h[at]),
                   what.str() << ": h[" << row << ", " << col << "] = " << value_h << ", expected " << h[at]);
      }
    }
    for (std::int64_t col = n; col < host.ldo; ++col) {
      GPU_EXPECT(got[static_cast<std::size_t>(row * host.ldo + col)] == kPoison,
                 what.str() << ": wrote beyond row " << row);
    }
  }
  for (std::size_t i = got.size() - kGuard; i < got.size(); ++i)
    GPU_EXPECT(got[i] == kPoison, what.str() << ": wrote beyond the end");
}

void run_cases(bool is_norm, bool is_aligned) {
  Random random(seed());
  for (int i = 0; i < cases(24); ++i) {
    PlanOptions options;
    options.world_size = static_cast<std::int32_t>(uniform(random, 2, 4));
    options.rank = static_cast<std::int32_t>(uniform(random, 0, options.world_size - 1));
    options.m = uniform(random, 1, 300);
    options.n = i % 8 == 7 ? uniform(random, 4000, 20000) : uniform(random, 1, 1200);
    if (is_aligned) options.n = (options.n + 7) / 8 * 8;
    options.k = 8;
    options.tile_m = uniform(random, 8, 64);
    options.tile_n = is_aligned ? 8 * uniform(random, 1, 32) : uniform(random, 5, 200);
    options.resources.compute_units = uniform(random, 1, 16);
    const DType dtype = i % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    options.dtype = dtype;
    const Steps steps{.bias = uniform(random, 0, 1) == 1,
                      .residual = uniform(random, 0, 1) == 1,
                      .residual_out = uniform(random, 0, 1) == 1,
                      .norm = is_norm,
                      .activation = static_cast<Activation>(i % 4)};
    // With 12 sources long rows leave no room for rows ahead, or for any.
    const int num_sums = i % 2 == 0 ? 0 : (i % 8 == 7 ? 12 : static_cast<int>(uniform(random, 1, 5)));
    run_case(dtype, options, i % 3, steps, is_aligned ? 8 * (i / 2 % 2) : i % 4, num_sums, random);
  }
}

}  // namespace

GPU_TEST(kernel_restore_aligned) {
  run_cases(false, true);
}
GPU_TEST(kernel_restore_unaligned) {
  run_cases(false, false);
}
GPU_TEST(kernel_restore_rms_norm_aligned) {
  run_cases(true, true);
}
GPU_TEST(kernel_restore_rms_norm_unaligned) {
  run_cases(true, false);
}

// Ranks that are threads launch the same kernel with different shared memory at the same time.
GPU_TEST(kernel_restore_of_several_threads) {
  constexpr std::int64_t kRows = 8, kCols = 4096;
  constexpr int kThreads = 3, kLaunches = 500;
  std::vector<std::string> errors(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        const cuda::DeviceBuffer memory(0, 2 * kRows * kCols * 2, "matrices");
        const cuda::CudaStream stream(0, cuda::CudaStream::Priority::kLow);
        cuda::RestoreParams params;
        params.rows = kRows;
        params.n = params.source_ld = params.ldo = kCols;
        params.source = memory.data();
        params.out = static_cast<char*>(memory.data()) + kRows * kCols * 2;
        params.sums.count = 2 + 3 * t;
        std::fill_n(params.sums.sources, params.sums.count, memory.data());
        for (int i = 0; i < kLaunches; ++i) cuda::launch_restore(params, stream.get());
        FLASHOVERLAP_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(t)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) GPU_EXPECT(error.empty(), error);
}

GPU_TEST(kernel_restore_refuses_bad_arguments) {
  const cuda::DeviceBuffer memory(0, 1 << 20, "matrices");
  cuda::RestoreParams params;
  params.rows = 1;
  params.n = 64;
  params.source = memory.data();
  params.source_ld = 64;
  params.out = memory.data();
  params.ldo = 64;
  const auto with = [&](auto change) {
    cuda::RestoreParams changed = params;
    change(changed);
    cuda::launch_restore(changed, nullptr);
  };
  GPU_EXPECT_ERROR(with([](auto& x) { x.dtype = DType::kFloat32; }), "f32");
  GPU_EXPECT_ERROR(with([](auto& x) { x.source = nullptr; }), "null");
  GPU_EXPECT_ERROR(with([](auto& x) { x.ldo = 63; }), "ldo 63");
  GPU_EXPECT_ERROR(with([](auto& x) { x.sums.count = 17; }), "17 partial sums, must be 0 to 16");
}

}  // namespace flashoverlap::gpu_test

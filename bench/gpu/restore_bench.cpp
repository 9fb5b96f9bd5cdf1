// Restore fused with RMSNorm against RMSNorm of a row-major matrix by the same kernel, and against a copy.
// bf16, random data.
//   restore_bench [--rounds 25]
// The packed source has the tile order of a GEMM + all-reduce (tiles of 256 x 256, or as given below), in
// schedule order.
#include <cstring>
#include <string>

#include "device.h"
#include "device_plan.h"
#include "flashoverlap/plan_builders.h"
#include "restore.h"
#include "test_matrices.h"
#include "timing.h"

namespace {

namespace fo = flashoverlap;

struct Case {
  std::int64_t m, n, tile_m, tile_n;
};
constexpr Case kCases[] = {{2048, 8192, 256, 256}, {4096, 8192, 256, 256}, {4096, 4096, 256, 256},
                           {8192, 8192, 256, 256}, {8192, 4096, 256, 128}, {16384, 8192, 256, 256},
                           {1024, 8192, 128, 512}, {4096, 8192, 256, 192}, {16384, 4096, 128, 256},
                           {4000, 8008, 256, 256}, {3333, 5120, 256, 256}};

struct Buffers {
  explicit Buffers(std::int64_t count)
      : packed(0, count * 2, "packed"),
        row_major(0, count * 2, "row-major"),
        residual(0, count * 2, "residual"),
        residual_out(0, count * 2, "residual out"),
        out(0, count * 2, "out"),
        weight(0, 1 << 20, "weight"),
        errors(0, 4, "errors") {}
  fo::cuda::DeviceBuffer packed, row_major, residual, residual_out, out, weight, errors;
};

template <class T>
fo::cuda::DeviceBuffer on_device(const std::vector<T>& host) {
  const auto bytes = static_cast<std::int64_t>(host.size() * sizeof(T));
  fo::cuda::DeviceBuffer buffer(0, bytes, "tables");
  fo::cuda::upload(0, buffer.data(), host.data(), static_cast<std::size_t>(bytes));
  return buffer;
}

void run(const Case& shape, int rounds, cudaStream_t stream) {
  fo::PlanOptions options;
  options.world_size = 2;
  options.dtype = fo::DType::kBFloat16;
  options.m = shape.m;
  options.n = shape.n;
  options.k = 64;
  options.tile_m = shape.tile_m;
  options.tile_n = shape.tile_n;
  options.swizzle = 4;
  options.resources.compute_units = 66;
  const fo::OverlapPlan plan = fo::plan_all_reduce(options);
  const fo::cuda::HostTables tables = fo::cuda::make_host_tables(plan);
  const auto pieces = on_device(tables.pieces);
  const auto rows = on_device(tables.rows);
  const std::int64_t count = shape.m * shape.n;
  const Buffers buffers(count);
  constexpr auto kType = bench::Element16::kBf16;
  bench::fill_random(kType, buffers.packed.data(), count, 1, stream);
  bench::fill_random(kType, buffers.residual.data(), count, 2, stream);
  bench::fill_random(kType, buffers.weight.data(), shape.n, 3, stream);

  fo::cuda::RestoreParams restore;
  restore.dtype = fo::DType::kBFloat16;
  restore.rows = shape.m;
  restore.n = shape.n;
  restore.source = buffers.packed.data();
  restore.restore = {.rows = static_cast<const fo::cuda::DeviceRow*>(rows.data()),
                     .pieces = static_cast<const fo::cuda::DevicePiece*>(pieces.data()),
                     .piece_cols = tables.piece_cols,
                     .is_aligned = tables.is_restore_aligned};
  restore.out = buffers.out.data();
  restore.ldo = shape.n;
  // A row-major copy of the same data is the source of the plain norm.
  fo::cuda::RestoreParams unpack = restore;
  unpack.out = buffers.row_major.data();
  fo::cuda::launch_restore(unpack, stream);
  restore.epilogue.rms_norm_weight = buffers.weight.data();
  fo::cuda::RestoreParams plain = restore;
  plain.source = buffers.row_major.data();
  plain.source_ld = shape.n;
  plain.restore = {};
  fo::cuda::RestoreParams fused_residual = restore;
  fused_residual.epilogue.residual = buffers.residual.data();
  fused_residual.epilogue.residual_ld = shape.n;
  fused_residual.epilogue.residual_out = buffers.residual_out.data();
  fused_residual.epilogue.residual_out_ld = shape.n;
  fo::cuda::RestoreParams plain_residual = fused_residual;
  plain_residual.source = buffers.row_major.data();
  plain_residual.source_ld = shape.n;
  plain_residual.restore = {};

  const auto launch = [](const fo::cuda::RestoreParams& params) -> bench::Launch {
    return [&params](cudaStream_t s) { fo::cuda::launch_restore(params, s); };
  };
  const bench::Launch copy = [&](cudaStream_t s) {
    BENCH_CUDA(cudaMemcpyAsync(buffers.out.data(), buffers.row_major.data(),
                               static_cast<std::size_t>(count) * 2, cudaMemcpyDeviceToDevice, s));
  };
  bench::Timer timer(stream);
  const std::vector<double> us = timer.compare_us(
      {launch(plain), launch(restore), launch(plain_residual), launch(fused_residual), launch(unpack), copy},
      rounds, 2);
  const double gbps = static_cast<double>(count) * 2 * 2 / 1e3;
  std::printf(
      "%5lld x %5lld  tile %3lld x %3lld | %8.1f %6.0f | %8.1f %6.4f | %8.1f %8.1f %6.4f | %8.1f | %8.1f "
      "%6.0f\n",
      static_cast<long long>(shape.m), static_cast<long long>(shape.n), static_cast<long long>(shape.tile_m),
      static_cast<long long>(shape.tile_n), us[0], gbps / us[0], us[1], us[1] / us[0], us[2], us[3],
      us[3] / us[2], us[4], us[5], gbps / us[5]);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = 25;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--rounds") == 0) rounds = std::stoi(argv[i + 1]);
  }
  cudaDeviceProp properties{};
  BENCH_CUDA(cudaGetDeviceProperties(&properties, 0));
  cudaStream_t stream;
  BENCH_CUDA(cudaStreamCreate(&stream));
  std::printf("# %s, bf16, medians of %d rounds of 2; GB/s counts bytes read and written\n", properties.name,
              rounds);
  std::printf(
      "#  rows     cols   packed as    | norm us   GB/s | restore+norm, / norm | +residual: norm, restored, "
      "ratio | unpack us | copy us GB/s\n");
  for (const Case& shape : kCases) run(shape, rounds, stream);
  BENCH_CUDA(cudaStreamDestroy(stream));
  return 0;
}

// The signal GEMM: every kernel, every kind of placement, random shapes; exact data, so nothing may differ by
// a bit.
#include <algorithm>
#include <numeric>
#include <random>

#include "flashoverlap/plan_builders.h"
#include "gemm_case.h"
#include "gpu_test.h"

namespace flashoverlap::gpu_test {
namespace {

using Random = std::mt19937_64;

std::int64_t uniform(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

bool runs_here(const cuda::SignalGemmVariant& variant) {
  cudaDeviceProp properties{};
  FLASHOVERLAP_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  const int capability = properties.major * 10 + properties.minor;
  return variant.exact_capability ? capability == variant.min_compute_capability
                                  : capability >= variant.min_compute_capability;
}

int num_device_sms() {
  int sms = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  return sms;
}

enum class PlanKind { kInPlace, kAllReduce, kContiguous, kBlockCyclic, kAllToAll, kColumnSlices };

// Columns of each rank's slice of the weight: cut anywhere, some of them empty.
SliceOptions any_slices(std::int64_t size, std::int32_t world_size, Random& random) {
  SliceOptions slices;
  for (std::int32_t rank = 0; rank < world_size; ++rank) {
    const bool is_last = rank + 1 == world_size;
    slices.sizes.push_back(is_last ? size : uniform(random, 0, size));
    size -= slices.sizes.back();
  }
  return slices;
}

OverlapPlan make_plan(PlanKind kind, PlanOptions options, Random& random) {
  options.world_size = kind == PlanKind::kInPlace ? 1 : static_cast<std::int32_t>(uniform(random, 2, 8));
  options.rank = static_cast<std::int32_t>(uniform(random, 0, options.world_size - 1));
  switch (kind) {
    case PlanKind::kInPlace:
    case PlanKind::kAllReduce:
      return plan_all_reduce(options);
    case PlanKind::kContiguous:
      return plan_reduce_scatter(options, RowOwnership::kContiguous);
    case PlanKind::kBlockCyclic:
      return plan_reduce_scatter(options, RowOwnership::kBlockCyclic);
    case PlanKind::kColumnSlices:
      return plan_all_gather_gemm(options, any_slices(options.n, options.world_size, random),
                                  SliceAxis::kColumns);
    case PlanKind::kAllToAll:
      break;
  }
  Routing routing;
  for (int rank = 0; rank < options.world_size; ++rank) {
    routing.destinations.emplace_back();
    const std::int64_t rows = rank == options.rank ? options.m : uniform(random, 0, 300);
    for (std::int64_t row = 0; row < rows; ++row) {
      routing.destinations.back().push_back(
          static_cast<std::int32_t>(uniform(random, 0, options.world_size - 1)));
    }
  }
  return plan_all_to_all(options, routing);
}

// Sizes at which things go wrong, and anything between.
std::int64_t size_near(Random& random, std::int64_t tile) {
  switch (uniform(random, 0, 5)) {
    case 0:
      return 1;
    case 1:
      return tile;
    case 2:
      return tile + 1;
    case 3:
      return 2 * tile - 8;
    default:
      return uniform(random, 1, 5 * tile / 2);
  }
}

std::int64_t padding(std::int64_t length, std::int64_t alignment) {
  return (alignment - length % alignment) % alignment;
}

void run_case(const cuda::SignalGemmVariant& variant, PlanKind kind, std::uint64_t seed) {
  Random random(seed);
  PlanOptions options;
  options.dtype = variant.type == cuda::GemmType::kBf16 ? DType::kBFloat16 : DType::kFloat16;
  options.m = size_near(random, variant.tile_rows);
  options.n = size_near(random, variant.tile_cols);
  options.k = size_near(random, 100);
  options.tile_m = variant.tile_rows;
  options.tile_n = variant.tile_cols;
  options.swizzle = uniform(random, 1, 4);
  const int num_sms = static_cast<int>(uniform(random, variant.blocks_per_tile, num_device_sms()));
  options.resources.compute_units = num_sms / variant.blocks_per_tile;
  Strides strides;
  const std::int64_t alignment = variant.operand_alignment;
  strides.lda_extra = static_cast<int>(padding(options.k, alignment) + alignment * uniform(random, 0, 2));
  strides.ldb_extra = static_cast<int>(padding(options.k, alignment) + alignment * uniform(random, 0, 2));
  strides.ldd_extra =
      static_cast<int>(uniform(random, 0, 1) == 0 ? uniform(random, 0, 9) : padding(options.n, 8));
  strides.offset = static_cast<int>(alignment * uniform(random, 0, 3));
  std::ostringstream what;
  what << variant.name << ", kind " << static_cast<int>(kind) << ", " << options.m << " x " << options.n
       << " x " << options.k << ", " << num_sms << " SMs, seed " << seed;
  GemmCase test(make_plan(kind, options, random), variant, 1, num_sms, strides, seed);
  test.launch(nullptr);
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  test.expect_packed(what.str());
  test.expect_counters_full(what.str());
  test.poison(nullptr);
  test.launch_plain(nullptr);
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  test.expect_plain(what.str());
  test.expect_counters_full(what.str());
}

void run_variants(PlanKind kind) {
  int tried = 0;
  for (const cuda::SignalGemmVariant* variant : cuda::signal_gemm_variants()) {
    if (!runs_here(*variant)) continue;
    for (int i = 0; i < cases(6); ++i)
      run_case(*variant, kind, seed() * 1000 + static_cast<std::uint64_t>(tried++));
  }
  if (tried == 0) throw Skip("no signal GEMM for this device");
}

// The quickest variant of the device, for tests that need one only.
const cuda::SignalGemmVariant& one_variant() {
  for (const cuda::SignalGemmVariant* variant : cuda::signal_gemm_variants()) {
    if (runs_here(*variant)) return *variant;
  }
  throw Skip("no signal GEMM for this device");
}

}  // namespace

GPU_TEST(kernel_gemm_in_place) {
  run_variants(PlanKind::kInPlace);
}
GPU_TEST(kernel_gemm_column_slices) {
  run_variants(PlanKind::kColumnSlices);
}
GPU_TEST(kernel_gemm_whole_tiles) {
  run_variants(PlanKind::kAllReduce);
}
GPU_TEST(kernel_gemm_rows_by_owner) {
  run_variants(PlanKind::kContiguous);
}
GPU_TEST(kernel_gemm_row_slabs) {
  run_variants(PlanKind::kBlockCyclic);
}
GPU_TEST(kernel_gemm_single_rows) {
  run_variants(PlanKind::kAllToAll);
}

// Problems with rows of their own (an empty one, too) and a weight of their own out of a stack, tiles in
// random order.
GPU_TEST(kernel_gemm_stacked_weights) {
  for (const cuda::SignalGemmVariant* variant : cuda::signal_gemm_variants()) {
    if (!runs_here(*variant)) continue;
    Random random(seed());
    OverlapPlan plan;
    plan.operation = "test";
    const std::int64_t n = variant->tile_cols + 24;
    const std::int64_t rows[] = {37, 0, variant->tile_rows + 5, 64};
    std::vector<Problem> problems;
    std::int64_t row_begin = 0;
    for (std::size_t i = 0; i < std::size(rows); ++i) {
      problems.push_back({row_begin, rows[i], 0, n, static_cast<std::int64_t>(std::size(rows) - 1 - i)});
      row_begin += rows[i];
    }
    plan.grid = TileGrid(problems, 136, variant->tile_rows, variant->tile_cols);
    plan.schedule.resize(static_cast<std::size_t>(plan.grid.num_tiles()));
    std::iota(plan.schedule.begin(), plan.schedule.end(), 0);
    std::shuffle(plan.schedule.begin(), plan.schedule.end(), random);
    plan.placement.first_segment.assign(plan.schedule.size() + 1, 0);
    plan.groups = {{0, plan.grid.num_tiles()}};
    plan.output_rows = row_begin;
    plan.output_cols = n;
    GemmCase test(plan, *variant, static_cast<int>(std::size(rows)), 8, {}, seed());
    test.launch(nullptr);
    FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
    test.expect_packed(variant->name);
    test.expect_counters_full(variant->name);
  }
}

// More elements than 31 bits count (known fault B13): the last tiles of the schedule are looked at.
GPU_TEST(large_kernel_gemm_offsets_beyond_31_bits) {
  const cuda::SignalGemmVariant& variant = one_variant();
  PlanOptions options;
  options.world_size = 2;
  options.dtype = DType::kBFloat16;
  options.m = 65536;
  options.n = 32776;
  options.k = 16;
  options.tile_m = variant.tile_rows;
  options.tile_n = variant.tile_cols;
  options.resources.compute_units = num_device_sms() / variant.blocks_per_tile;
  const OverlapPlan plan = plan_all_reduce(options);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  const std::int64_t bytes = options.m * options.n * 2;
  if (free_bytes < static_cast<std::size_t>(bytes) + (1 << 30)) throw Skip("needs 5.3 GB of device memory");
  const cuda::DeviceBuffer a = device_copy(small_integers(variant.type, options.m * options.k, seed()));
  const cuda::DeviceBuffer b = device_copy(small_integers(variant.type, options.n * options.k, seed() + 1));
  const cuda::DeviceBuffer d(0, bytes, "output");
  const cuda::DevicePlan tables(0, plan, variant);
  cuda::SignalGemmArguments args{.m = static_cast<int>(options.m),
                                 .n = static_cast<int>(options.n),
                                 .k = static_cast<int>(options.k),
                                 .a = a.data(),
                                 .lda = options.k,
                                 .b = b.data(),
                                 .ldb = options.k,
                                 .packed = d.data(),
                                 .packed_size = options.m * options.n,
                                 .output = d.data(),
                                 .ldd = options.n,
                                 .tables = tables.tables(),
                                 .counters = nullptr,
                                 .gates = {},
                                 .finish = {},
                                 .num_sms = num_device_sms()};
  const cuda::DeviceBuffer reference(0, variant.tile_rows * options.n * 2, "reference");
  const cuda::DeviceBuffer differences = device_copy(std::vector<unsigned>{0});
  const auto look = [&](const Tile& tile, const std::uint16_t* at, std::int64_t ldd, const char* what) {
    reference_gemm(variant.type, static_cast<const std::uint16_t*>(a.data()) + tile.row_begin * options.k,
                   options.k, static_cast<const std::uint16_t*>(b.data()) + tile.col_begin * options.k,
                   options.k, static_cast<int>(tile.rows), static_cast<int>(tile.cols),
                   static_cast<int>(options.k), reference.data(), tile.cols, nullptr);
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      count_differences(at + row * ldd, static_cast<const std::uint16_t*>(reference.data()) + row * tile.cols,
                        tile.cols, static_cast<unsigned*>(differences.data()), nullptr);
    }
    const unsigned wrong = host_copy<unsigned>(differences)[0];
    GPU_EXPECT(wrong == 0, what << ": " << wrong << " elements of the tile at " << tile.row_begin << ", "
                                << tile.col_begin);
  };
  const auto* data = static_cast<const std::uint16_t*>(d.data());
  const std::int64_t last = plan.schedule.back();
  const Tile corner = plan.grid.tile(plan.grid.num_tiles() - 1);
  FLASHOVERLAP_CUDA_CHECK(cudaMemset(d.data(), 0xff, static_cast<std::size_t>(bytes)));
  variant.prepare(args)->launch(nullptr);
  look(plan.grid.tile(last), data + plan.placement.of_tile(last)[0].offset, plan.grid.tile(last).cols,
       "packed");
  look(plan.grid.tile(plan.schedule.front()), data + plan.placement.of_tile(plan.schedule.front())[0].offset,
       plan.grid.tile(plan.schedule.front()).cols, "packed");
  FLASHOVERLAP_CUDA_CHECK(cudaMemset(d.data(), 0xff, static_cast<std::size_t>(bytes)));
  args.tables = tables.plain_tables();
  variant.prepare(args)->launch(nullptr);
  look(corner, data + corner.row_begin * options.n + corner.col_begin, options.n, "in place");
}

GPU_TEST(kernel_gemm_refuses_bad_arguments) {
  const cuda::SignalGemmVariant& variant = one_variant();
  PlanOptions options;
  options.m = options.n = options.k = 64;
  options.dtype = DType::kBFloat16;
  options.tile_m = variant.tile_rows;
  options.tile_n = variant.tile_cols;
  const OverlapPlan plan = plan_all_reduce(options);
  const cuda::DevicePlan tables(0, plan, variant);
  const cuda::DeviceBuffer memory(0, 1 << 20, "operands");
  cuda::SignalGemmArguments args{.m = 64,
                                 .n = 64,
                                 .k = 64,
                                 .a = memory.data(),
                                 .lda = 64,
                                 .b = memory.data(),
                                 .ldb = 64,
                                 .output = memory.data(),
                                 .ldd = 64,
                                 .tables = tables.tables(),
                                 .gates = {},
                                 .finish = {},
                                 .num_sms = 8};
  const auto with = [&](auto change) {
    cuda::SignalGemmArguments changed = args;
    change(changed);
    return [changed, &variant] { variant.prepare(changed); };
  };
  GPU_EXPECT_ERROR(with([](auto& x) { x.m = 0; })(), "m 0");
  GPU_EXPECT_ERROR(with([](auto& x) { x.a = nullptr; })(), "must not be null");
  GPU_EXPECT_ERROR(with([](auto& x) { x.lda = 63; })(), "lda 63");
  GPU_EXPECT_ERROR(with([](auto& x) { x.ldd = 32; })(), "ldd 32");
  GPU_EXPECT_ERROR(with([](auto& x) { x.num_sms = 0; })(), "0 SMs");
  GPU_EXPECT_ERROR(with([](auto& x) { x.tables = {}; })(), "at least one tile");
  if (variant.operand_alignment == 8) {
    GPU_EXPECT_ERROR(with([](auto& x) { x.a = static_cast<const std::uint16_t*>(x.a) + 1; })(), "16 bytes");
    GPU_EXPECT_ERROR(with([](auto& x) { x.ldb = 68; })(), "ldb 68");
  }
  options.tile_m = variant.tile_rows / 2;
  GPU_EXPECT_ERROR(cuda::DevicePlan(0, plan_all_reduce(options), variant), variant.name);
}

}  // namespace flashoverlap::gpu_test

#include "gemm_case.h"

#include <algorithm>

#include "gemm_choice.h"
#include "gpu_test.h"

namespace flashoverlap::gpu_test {
namespace {

std::vector<std::uint16_t> poisoned(std::int64_t count) {
  return std::vector<std::uint16_t>(static_cast<std::size_t>(count), kPoison);
}

void expect_equal(const cuda::DeviceBuffer& got, const std::vector<std::uint16_t>& expected,
                  std::int64_t guard, const std::string& what) {
  const std::vector<std::uint16_t> host = host_copy<std::uint16_t>(got);
  GPU_EXPECT(host.size() == expected.size(), what);
  std::int64_t wrong = 0;
  std::int64_t first = -1;
  for (std::size_t i = 0; i < host.size(); ++i) {
    if (host[i] == expected[i]) continue;
    if (first < 0) first = static_cast<std::int64_t>(i);
    ++wrong;
  }
  GPU_EXPECT(wrong == 0, what << ": " << wrong << " of " << host.size() << " elements, the first at "
                              << first - guard << ": 0x" << std::hex << host[static_cast<std::size_t>(first)]
                              << " instead of 0x" << expected[static_cast<std::size_t>(first)]);
}

}  // namespace

std::vector<const cuda::SignalGemmVariant*> all_variants() {
  std::vector<const cuda::SignalGemmVariant*> all = cuda::variants_for(0, DType::kBFloat16);
  const auto halves = cuda::variants_for(0, DType::kFloat16);
  all.insert(all.end(), halves.begin(), halves.end());
  return all;
}

GemmCase::GemmCase(OverlapPlan plan, const cuda::SignalGemmVariant& variant, int num_weights, int num_sms,
                   const Strides& strides, std::uint64_t seed)
    : plan_(std::move(plan)),
      m_(plan_.grid.rows()),
      n_(plan_.grid.cols()),
      k_(plan_.grid.k()),
      ldd_(n_ + strides.ldd_extra) {
  const std::int64_t lda = k_ + strides.lda_extra;
  const std::int64_t ldb = k_ + strides.ldb_extra;
  a_ = device_copy(small_integers(variant.type, m_ * lda + strides.offset, seed));
  b_ = device_copy(small_integers(variant.type, n_ * num_weights * ldb + strides.offset, seed + 1));
  const auto* a = static_cast<const std::uint16_t*>(a_.data()) + strides.offset;
  const auto* b = static_cast<const std::uint16_t*>(b_.data()) + strides.offset;
  std::vector<std::uint16_t> product;
  for (int weight = 0; weight < num_weights; ++weight) {
    cuda::DeviceBuffer reference(0, std::max<std::int64_t>(m_ * n_ * 2, 2), "reference");
    reference_gemm(variant.type, a, lda, b + weight * n_ * ldb, ldb, static_cast<int>(m_),
                   static_cast<int>(n_), static_cast<int>(k_), reference.data(), n_, nullptr);
    const std::vector<std::uint16_t> one = host_copy<std::uint16_t>(reference);
    product.insert(product.end(), one.begin(), one.end());
  }
  make_expected(product);
  packed_ = device_copy(poisoned(plan_.packed_size + 2 * kGuard));
  output_ = device_copy(poisoned(m_ * ldd_ + 2 * kGuard));
  expected_packed_ = device_copy(expected_packed_host_);
  tables_ = std::make_unique<cuda::DevicePlan>(0, plan_, variant);
  cuda::SignalGemmArguments args;
  args.m = static_cast<int>(m_);
  args.n = static_cast<int>(n_);
  args.k = static_cast<int>(k_);
  args.a = a;
  args.lda = lda;
  args.b = b;
  args.ldb = ldb;
  args.num_weights = num_weights;
  args.packed = packed();
  args.packed_size = plan_.packed_size;
  args.output = static_cast<std::uint16_t*>(output_.data()) + kGuard;
  args.ldd = ldd_;
  args.tables = tables_->tables();
  args.counters = tables_->counters();
  args.num_sms = num_sms;
  gemm_ = variant.prepare(args);
  args.tables = tables_->plain_tables();
  args.counters = nullptr;
  plain_ = variant.prepare(args);
}

void GemmCase::make_expected(const std::vector<std::uint16_t>& product) {
  expected_packed_host_ = poisoned(plan_.packed_size + 2 * kGuard);
  expected_output_host_ = poisoned(m_ * ldd_ + 2 * kGuard);
  expected_plain_host_ = expected_output_host_;
  for (std::int64_t index = 0; index < plan_.grid.num_tiles(); ++index) {
    const Tile& tile = plan_.grid.tile(index);
    const std::int64_t weight = plan_.grid.problems()[static_cast<std::size_t>(tile.problem)].weight;
    const auto row_of = [&](std::int64_t row) {
      return product.begin() + weight * m_ * n_ + (tile.row_begin + row) * n_ + tile.col_begin;
    };
    const auto segments = plan_.placement.of_tile(index);
    for (const PlacementSegment& segment : segments) {
      for (std::int64_t row = 0; row < segment.rows; ++row) {
        std::copy_n(row_of(segment.row_begin + row), tile.cols,
                    expected_packed_host_.begin() + kGuard + segment.offset + row * tile.cols);
      }
    }
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      const std::int64_t at = kGuard + (tile.row_begin + row) * ldd_ + tile.col_begin;
      std::copy_n(row_of(row), tile.cols, expected_plain_host_.begin() + at);
      if (segments.empty()) std::copy_n(row_of(row), tile.cols, expected_output_host_.begin() + at);
    }
  }
}

void GemmCase::poison(cudaStream_t stream) const {
  FLASHOVERLAP_CUDA_CHECK(
      cudaMemsetAsync(packed_.data(), 0xff, static_cast<std::size_t>(packed_.bytes()), stream));
  FLASHOVERLAP_CUDA_CHECK(
      cudaMemsetAsync(output_.data(), 0xff, static_cast<std::size_t>(output_.bytes()), stream));
}

void GemmCase::expect_packed(const std::string& what) const {
  expect_equal(packed_, expected_packed_host_, kGuard, what + ", packed");
  expect_equal(output_, expected_output_host_, kGuard, what + ", output");
}

void GemmCase::expect_plain(const std::string& what) const {
  expect_equal(output_, expected_plain_host_, kGuard, what + ", in place");
}

void GemmCase::expect_counters_full(const std::string& what) const {
  std::vector<std::uint32_t> counters(plan_.groups.size());
  FLASHOVERLAP_CUDA_CHECK(
      cudaMemcpy(counters.data(), tables_->counters(), counters.size() * 4, cudaMemcpyDeviceToHost));
  for (std::size_t group = 0; group < counters.size(); ++group) {
    const std::uint32_t target = tables_->target(static_cast<std::int64_t>(group));
    GPU_EXPECT(counters[group] == target,
               what << ": counter " << group << " is " << counters[group] << ", target " << target);
  }
}

void GemmCase::expect_counters_zero(const std::string& what) const {
  std::vector<std::uint32_t> counters(plan_.groups.size());
  FLASHOVERLAP_CUDA_CHECK(
      cudaMemcpy(counters.data(), tables_->counters(), counters.size() * 4, cudaMemcpyDeviceToHost));
  for (const std::uint32_t counter : counters) GPU_EXPECT(counter == 0, what << ": a counter is " << counter);
}

GemmCase::Range GemmCase::packed_range(std::int64_t group) const {
  const WaveGroup& positions = plan_.groups[static_cast<std::size_t>(group)];
  std::int64_t begin = plan_.packed_size;
  std::int64_t count = 0;
  for (std::int64_t p = positions.first_position; p < positions.first_position + positions.num_tiles; ++p) {
    const std::int64_t tile = plan_.schedule[static_cast<std::size_t>(p)];
    for (const PlacementSegment& segment : plan_.placement.of_tile(tile)) {
      begin = std::min(begin, segment.offset);
      count += segment.rows * plan_.grid.tile(tile).cols;
    }
  }
  return {count == 0 ? 0 : begin, count};
}

}  // namespace flashoverlap::gpu_test

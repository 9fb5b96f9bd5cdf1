// Gates of the GEMM kernels alone: no tile reads its input before that has arrived, and a slice that never
// arrives ends the kernel with a record.
#include <algorithm>
#include <thread>

#include "arrivals.h"
#include "counter_table.h"
#include "device_plan.h"
#include "flashoverlap/plan_builders.h"
#include "gemm_case.h"
#include "gemm_reference.h"
#include "gpu_ranks.h"
#include "gpu_test.h"
#include "wait.h"

namespace flashoverlap::gpu_test {
namespace {

constexpr int kRanks = 3;
constexpr int kSms = 16;  // few: several waves, so that tiles of one walk wait for different slices

/// Rank 1's all-gather + GEMM, with the arrivals played by the test.
class GatedCase {
 public:
  GatedCase(const cuda::SignalGemmVariant& variant, std::int64_t k) : k_(k) {
    PlanOptions options;
    options.rank = 1;
    options.world_size = kRanks;
    options.dtype = variant.type == cuda::GemmType::kBf16 ? DType::kBFloat16 : DType::kFloat16;
    options.m = m_;
    options.n = n_;
    options.k = k;
    options.tile_m = variant.tile_rows;
    options.tile_n = variant.tile_cols;
    options.resources.compute_units = kSms / variant.blocks_per_tile;
    plan_ = plan_all_gather_gemm(options, {});
    steps_ = cuda::transfer_steps(plan_);
    needed_ = device_copy(cuda::gate_tables(plan_, steps_).start);
    full_a_ = device_copy(small_integers(variant.type, m_ * k, seed()));
    a_ = device_copy(std::vector<std::uint16_t>(static_cast<std::size_t>(m_ * k), kPoison));
    b_ = device_copy(small_integers(variant.type, n_ * k, seed() + 1));
    out_ = device_copy(std::vector<std::uint16_t>(static_cast<std::size_t>(m_ * n_), kPoison));
    reference_ = device_copy(std::vector<std::uint16_t>(static_cast<std::size_t>(m_ * n_), kPoison));
    reference_gemm(variant.type, full_a_.data(), k, b_.data(), k, static_cast<int>(m_), static_cast<int>(n_),
                   static_cast<int>(k), reference_.data(), n_, nullptr);
    FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
    tables_ = std::make_unique<cuda::DevicePlan>(0, plan_, variant);
    arrivals_ = cuda::CounterTable(0, 1);
    variant.load();
    cuda::load_wait_kernel();
    FLASHOVERLAP_CUDA_CHECK(
        cudaHostAlloc(reinterpret_cast<void**>(&error_), sizeof *error_, cudaHostAllocMapped));
    *error_ = {};
    arguments_.m = static_cast<int>(m_);
    arguments_.n = static_cast<int>(n_);
    arguments_.k = static_cast<int>(k);
    arguments_.a = a_.data();
    arguments_.lda = k;
    arguments_.b = b_.data();
    arguments_.ldb = k;
    arguments_.output = out_.data();
    arguments_.ldd = n_;
    arguments_.tables = tables_->tables();
    arguments_.num_sms = kSms;
    arguments_.gates.needed = static_cast<const std::uint32_t*>(needed_.data());
    arguments_.gates.arrivals = arrivals_.data();
    arguments_.gates.error = error_;
    arguments_.gates.timeout_ns = std::uint64_t{10'000'000'000} * static_cast<unsigned>(patience());
    FLASHOVERLAP_CUDA_CHECK(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking));
    FLASHOVERLAP_CUDA_CHECK(cudaStreamCreateWithFlags(&transfers_, cudaStreamNonBlocking));
  }
  ~GatedCase() {
    (void)cudaStreamDestroy(compute_);
    (void)cudaStreamDestroy(transfers_);
    (void)cudaFreeHost(error_);
  }
  GatedCase(const GatedCase&) = delete;
  GatedCase& operator=(const GatedCase&) = delete;

  /// The own rows in place, all others poisoned, nothing arrived.
  void reset() const {
    const auto begins = slice_begins({}, m_, kRanks);
    FLASHOVERLAP_CUDA_CHECK(cudaMemset(a_.data(), 0xFF, static_cast<std::size_t>(a_.bytes())));
    FLASHOVERLAP_CUDA_CHECK(cudaMemset(out_.data(), 0xFF, static_cast<std::size_t>(out_.bytes())));
    copy_in(begins[1] * k_, (begins[2] - begins[1]) * k_, nullptr);
    FLASHOVERLAP_CUDA_CHECK(cudaMemset(arrivals_.data(), 0, sizeof(std::uint32_t)));
    FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  }

  /// A slice after a while, the next after another: each by a copy, then the word.
  void deliver(bool by_stream_memory) const {
    for (const cuda::TransferStep& step : steps_) {
      if (!step.brings_slice) continue;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const Region& region = plan_.transfers[static_cast<std::size_t>(step.receive)].destination;
      copy_in(region.offset, region.count, transfers_);
      if (by_stream_memory) {
        cuda::enqueue_write_value(arrivals_.data(), step.arrivals, transfers_);
      } else {
        cuda::launch_write_kernel(arrivals_.data(), step.arrivals, transfers_);
      }
    }
  }

  void expect_right(const std::string& what) const {
    FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
    GPU_EXPECT(error_->code == 0, what << ": code " << error_->code);
    const auto got = host_copy<std::uint16_t>(out_);
    const auto expected = host_copy<std::uint16_t>(reference_);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < got.size(); ++i) wrong += got[i] != expected[i] ? 1U : 0U;
    GPU_EXPECT(wrong == 0, what << ": " << wrong << " of " << got.size() << " elements are wrong");
  }

  [[nodiscard]] cuda::SignalGemmArguments& arguments() { return arguments_; }
  [[nodiscard]] cudaStream_t compute() const { return compute_; }
  [[nodiscard]] const cuda::WaitError& error() const { return *error_; }

 private:
  void copy_in(std::int64_t offset, std::int64_t count, cudaStream_t stream) const {
    FLASHOVERLAP_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::uint16_t*>(a_.data()) + offset,
                                            static_cast<const std::uint16_t*>(full_a_.data()) + offset,
                                            static_cast<std::size_t>(count) * 2, cudaMemcpyDeviceToDevice,
                                            stream));
  }

  const std::int64_t m_ = 1300, n_ = 776;
  std::int64_t k_;
  OverlapPlan plan_;
  std::vector<cuda::TransferStep> steps_;
  cuda::DeviceBuffer needed_, full_a_, a_, b_, out_, reference_;
  std::unique_ptr<cuda::DevicePlan> tables_;
  cuda::CounterTable arrivals_;
  cuda::WaitError* error_ = nullptr;
  cuda::SignalGemmArguments arguments_;
  cudaStream_t compute_ = nullptr, transfers_ = nullptr;
};

}  // namespace

// Poison that a tile reads too early shows in its output.
GPU_TEST(kernel_gate_holds_tiles) {
  for (const cuda::SignalGemmVariant* variant : all_variants()) {
    // Rows of 2 * 72 bytes: cache lines straddle two slices. Kernels for odd rows get them.
    GatedCase test(*variant,
                   variant->operand_alignment >= 8 ? 72 : (variant->operand_alignment == 2 ? 70 : 69));
    const auto gemm = variant->prepare(test.arguments());
    for (const bool by_stream_memory : {false, true, false, true}) {
      test.reset();
      gemm->launch(test.compute());
      test.deliver(by_stream_memory);
      test.expect_right(std::string(variant->name) + (by_stream_memory ? ", stream memory" : ", kernel"));
    }
  }
}

GPU_TEST(kernel_gate_is_open_when_all_is_there) {
  for (const cuda::SignalGemmVariant* variant : all_variants()) {
    GatedCase test(*variant, 256);
    const auto gemm = variant->prepare(test.arguments());
    test.reset();
    test.deliver(false);
    FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
    gemm->launch(test.compute());
    test.expect_right(variant->name);
  }
}

GPU_TEST(kernel_gate_times_out) {
  for (const cuda::SignalGemmVariant* variant : all_variants()) {
    GatedCase test(*variant, 64);
    test.arguments().gates.timeout_ns = 20'000'000;
    const auto gemm = variant->prepare(test.arguments());
    test.reset();
    gemm->launch(test.compute());
    FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
    const cuda::WaitError error = test.error();
    GPU_EXPECT(error.code == 3 && error.seen == 0 && error.expected >= 1 && error.expected < kRanks,
               variant->name << ": code " << error.code << ", seen " << error.seen << ", expected "
                             << error.expected);
  }
}

GPU_TEST(kernel_gate_aborts) {
  const cuda::SignalGemmVariant* const variant = all_variants().front();
  GatedCase test(*variant, 64);
  std::uint32_t* word = nullptr;
  FLASHOVERLAP_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&word), sizeof *word, cudaHostAllocMapped));
  *static_cast<volatile std::uint32_t*>(word) = 0;
  test.arguments().gates.abort = word;
  const auto gemm = variant->prepare(test.arguments());
  test.reset();
  gemm->launch(test.compute());
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const cudaError_t state = cudaStreamQuery(test.compute());
  (void)cudaGetLastError();  // "not ready" would be reported by the next check
  *static_cast<volatile std::uint32_t*>(word) = 1;
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  FLASHOVERLAP_CUDA_CHECK(cudaFreeHost(word));
  GPU_EXPECT(state == cudaErrorNotReady, "the kernel ended without its input");
  GPU_EXPECT(test.error().code == 4, "code " << test.error().code);
}

}  // namespace flashoverlap::gpu_test

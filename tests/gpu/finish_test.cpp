// Finish gates of the GEMM kernels alone: the own slice's tiles wait for what other ranks have computed of
// them, and are stored as the sum; all others are stored, and counted, without waiting.
#include <algorithm>
#include <thread>

#include "arrivals.h"
#include "core/half.h"
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
constexpr int kOwn = 1;
constexpr int kSms = 16;  // few: several waves, so that tiles of one walk wait for different parts

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// Rank 1's tail-free reduce-scatter, with the arrivals played by the test.
class FinishCase {
 public:
  FinishCase(const cuda::SignalGemmVariant& variant, std::int64_t n) : variant_(variant), n_(n) {
    PlanOptions options;
    options.rank = kOwn;
    options.world_size = kRanks;
    options.dtype = variant.type == cuda::GemmType::kBf16 ? DType::kBFloat16 : DType::kFloat16;
    options.m = m_;
    options.n = n;
    options.k = k_;
    options.tile_m = variant.tile_rows;
    options.tile_n = variant.tile_cols;
    options.resources.compute_units = kSms / variant.blocks_per_tile;
    plan_ = plan_tail_free_reduce_scatter(options, {.sizes = {}, .parts = 3});
    steps_ = cuda::transfer_steps(plan_);
    const cuda::GateTables gates = cuda::gate_tables(plan_, steps_);
    needed_ = device_copy(gates.finish);
    added_ = device_copy(gates.added);
    a_ = device_copy(small_integers(variant.type, m_ * k_, seed()));
    b_ = device_copy(small_integers(variant.type, n_ * k_, seed() + 1));
    compute_partial_products();
    fill_received();
    const auto poisoned = [](std::int64_t count) {
      return device_copy(std::vector<std::uint16_t>(index(count), kPoison));
    };
    received_ = poisoned(plan_.received_size);
    packed_ = poisoned(plan_.packed_size);
    out_ = poisoned(plan_.output_rows * n_);
    tables_ = std::make_unique<cuda::DevicePlan>(0, plan_, variant);
    arrivals_ = cuda::CounterTable(0, 1);
    variant.load();
    cuda::load_wait_kernel();
    FLASHOVERLAP_CUDA_CHECK(
        cudaHostAlloc(reinterpret_cast<void**>(&error_), sizeof *error_, cudaHostAllocMapped));
    *error_ = {};
    FLASHOVERLAP_CUDA_CHECK(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking));
    FLASHOVERLAP_CUDA_CHECK(cudaStreamCreateWithFlags(&transfers_, cudaStreamNonBlocking));
  }
  ~FinishCase() {
    (void)cudaStreamDestroy(compute_);
    (void)cudaStreamDestroy(transfers_);
    (void)cudaFreeHost(error_);
  }
  FinishCase(const FinishCase&) = delete;
  FinishCase& operator=(const FinishCase&) = delete;

  [[nodiscard]] cuda::SignalGemmArguments arguments(std::uint64_t timeout_ns) const {
    cuda::SignalGemmArguments arguments;
    arguments.m = static_cast<int>(m_);
    arguments.n = static_cast<int>(n_);
    arguments.k = static_cast<int>(k_);
    arguments.a = a_.data();
    arguments.lda = k_;
    arguments.b = b_.data();
    arguments.ldb = k_;
    arguments.packed = packed_.data();
    arguments.packed_size = plan_.packed_size;
    arguments.output = out_.data();
    arguments.output_rows = static_cast<int>(plan_.output_rows);
    arguments.output_cols = static_cast<int>(n_);
    arguments.ldd = n_;
    arguments.tables = tables_->tables();
    arguments.counters = tables_->counters();
    arguments.num_sms = kSms;
    arguments.finish = {.gates = {.needed = static_cast<const std::uint32_t*>(needed_.data()),
                                  .arrivals = arrivals_.data(),
                                  .abort = nullptr,
                                  .error = error_,
                                  .timeout_ns = timeout_ns},
                        .received = received_.data(),
                        .offsets = static_cast<const std::int64_t*>(added_.data()),
                        .others = kRanks - 1,
                        .lower = kOwn,
                        .epilogue = {}};
    return arguments;
  }

  void reset() const {
    for (const auto* buffer : {&received_, &packed_, &out_})
      FLASHOVERLAP_CUDA_CHECK(cudaMemset(buffer->data(), 0xFF, static_cast<std::size_t>(buffer->bytes())));
    FLASHOVERLAP_CUDA_CHECK(cudaMemset(arrivals_.data(), 0, sizeof(std::uint32_t)));
    tables_->reset_counters(nullptr);
    FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  }

  /// A part after a while, the next after another; the first once everything that is sent is complete.
  void deliver(bool by_stream_memory) const {
    for (const Transfer& transfer : plan_.transfers) {
      if (transfer.trigger.kind != TriggerKind::kGroup) continue;
      cuda::WaitParams wait;
      wait.counter = tables_->counter(transfer.trigger.index);
      wait.target = tables_->target(transfer.trigger.index);
      wait.timeout_ns = std::uint64_t{5'000'000'000} * static_cast<unsigned>(patience());
      cuda::launch_wait_kernel(wait, transfers_);
    }
    for (const cuda::TransferStep& step : steps_) {
      if (!step.brings_slice) continue;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const Region& region = plan_.transfers[index(step.receive)].destination;
      FLASHOVERLAP_CUDA_CHECK(
          cudaMemcpyAsync(static_cast<std::uint16_t*>(received_.data()) + region.offset,
                          static_cast<const std::uint16_t*>(full_received_.data()) + region.offset,
                          static_cast<std::size_t>(region.count) * 2, cudaMemcpyDeviceToDevice, transfers_));
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
    const auto out = host_copy<std::uint16_t>(out_);
    for (std::int64_t i = 0; i < plan_.output_rows * n_; ++i) {
      const std::int64_t row = i / n_ - plan_.output_row_shift;
      float sum = 0.0F;
      for (int rank = 0; rank < kRanks; ++rank) {
        const float part = to_float(partial_[index(rank)][index(row * n_ + i % n_)]);
        sum = rank == 0 ? part : sum + part;
      }
      GPU_EXPECT(out[index(i)] == from_float(sum), what << ": row " << i / n_ << ", column " << i % n_
                                                        << " is " << to_float(out[index(i)]) << ", expected "
                                                        << sum);
    }
    const auto packed = host_copy<std::uint16_t>(packed_);
    for (std::int64_t t = 0; t < plan_.grid.num_tiles(); ++t) {
      const Tile& tile = plan_.grid.tile(t);
      for (const PlacementSegment& segment : plan_.placement.of_tile(t)) {
        for (std::int64_t i = 0; i < segment.rows * tile.cols; ++i) {
          const std::int64_t row = tile.row_begin + segment.row_begin + i / tile.cols;
          const std::int64_t col = tile.col_begin + i % tile.cols;
          GPU_EXPECT(packed[index(segment.offset + i)] == partial_[kOwn][index(row * n_ + col)],
                     what << ": what is sent of tile " << t << " is wrong");
        }
      }
    }
  }

  [[nodiscard]] cudaStream_t compute() const { return compute_; }
  [[nodiscard]] const cuda::WaitError& error() const { return *error_; }

 private:
  [[nodiscard]] float to_float(std::uint16_t bits) const {
    float value = 0.0F;
    core::to_float(&bits, plan_.dtype, &value, 1);
    return value;
  }
  [[nodiscard]] std::uint16_t from_float(float value) const {
    std::uint16_t bits = 0;
    core::from_float(&value, plan_.dtype, &bits, 1);
    return bits;
  }

  /// The own one is of a_ and b_, the others of other data, so that the sums need rounding.
  void compute_partial_products() {
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto salt = static_cast<std::uint64_t>(10 * rank);
      const auto a = rank == kOwn ? cuda::DeviceBuffer()
                                  : device_copy(small_integers(variant_.type, m_ * k_, seed() + salt + 2));
      const auto b = rank == kOwn ? cuda::DeviceBuffer()
                                  : device_copy(small_integers(variant_.type, n_ * k_, seed() + salt + 3));
      const auto d = device_copy(std::vector<std::uint16_t>(index(m_ * n_), kPoison));
      reference_gemm(variant_.type, rank == kOwn ? a_.data() : a.data(), k_,
                     rank == kOwn ? b_.data() : b.data(), k_, static_cast<int>(m_), static_cast<int>(n_),
                     static_cast<int>(k_), d.data(), n_, nullptr);
      FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
      partial_.push_back(host_copy<std::uint16_t>(d));
    }
  }

  void fill_received() {
    std::vector<std::uint16_t> full(index(plan_.received_size), kPoison);
    for (const Gate& gate : plan_.gates) {
      const auto& source = partial_[index(plan_.slices[index(gate.slice)].source)];
      const Tile& tile = plan_.grid.tile(gate.tile);
      for (std::int64_t i = 0; i < tile.size(); ++i) {
        full[index(gate.offset + i)] =
            source[index((tile.row_begin + i / tile.cols) * n_ + tile.col_begin + i % tile.cols)];
      }
    }
    full_received_ = device_copy(full);
  }

  const cuda::SignalGemmVariant& variant_;
  const std::int64_t m_ = 1300, k_ = 72;
  std::int64_t n_;
  OverlapPlan plan_;
  std::vector<cuda::TransferStep> steps_;
  std::vector<std::vector<std::uint16_t>> partial_;  // by rank: [m, n]
  cuda::DeviceBuffer needed_, added_, a_, b_, full_received_, received_, packed_, out_;
  std::unique_ptr<cuda::DevicePlan> tables_;
  cuda::CounterTable arrivals_;
  cuda::WaitError* error_ = nullptr;
  cudaStream_t compute_ = nullptr, transfers_ = nullptr;
};

}  // namespace

// Poison that is added too early shows in the output. Rows of 776 elements are aligned, of 773 are not.
GPU_TEST(kernel_finish_adds_what_has_arrived) {
  for (const cuda::SignalGemmVariant* variant : all_variants()) {
    for (const std::int64_t n : {776, 773}) {
      const FinishCase test(*variant, n);
      const auto gemm = variant->prepare(test.arguments(10'000'000'000));
      for (const bool by_stream_memory : {false, true, false}) {
        test.reset();
        gemm->launch(test.compute());
        test.deliver(by_stream_memory);
        test.expect_right(std::string(variant->name) + (by_stream_memory ? ", stream memory" : ", kernel"));
      }
    }
  }
}

GPU_TEST(kernel_finish_times_out) {
  for (const cuda::SignalGemmVariant* variant : all_variants()) {
    const FinishCase test(*variant, 776);
    const auto gemm = variant->prepare(test.arguments(20'000'000));
    test.reset();
    gemm->launch(test.compute());
    FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
    const cuda::WaitError error = test.error();
    GPU_EXPECT(error.code == 3 && error.seen == 0 && error.expected >= 1,
               variant->name << ": code " << error.code << ", seen " << error.seen << ", expected "
                             << error.expected);
  }
}

GPU_TEST(kernel_finish_excludes_start_gates) {
  const cuda::SignalGemmVariant* const variant = all_variants().front();
  const FinishCase test(*variant, 776);
  cuda::SignalGemmArguments both = test.arguments(1'000'000);
  both.gates = both.finish.gates;
  GPU_EXPECT_ERROR((void)variant->prepare(both), "at their start and at their end");
}

}  // namespace flashoverlap::gpu_test

// A layer of experts on one GPU: its memory, and the passes over rows between its GEMMs.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "consumer_log.h"
#include "cublas_products.h"
#include "cuda_stream.h"
#include "device.h"
#include "plan/moe_device.h"
#include "sm_partition.h"

namespace flashoverlap::cuda {

class MoeCudaDevice final : public plan::MoeDevice {
 public:
  struct Options {
    int device = 0;
    DeviceMemory memory = DeviceMemory::kStreamOrdered;  ///< Of what other ranks read.
    int num_sms = 1;                                     ///< For products over rows.
    int most_consumers = 0;                              ///< As the method.
    std::shared_ptr<ConsumerLog> consumers;              ///< Of the executor.
    std::string gemm_variant;                            ///< As of CudaOptions.
    std::shared_ptr<const SmPartition> partition;        ///< Null: none of its own.
  };
  explicit MoeCudaDevice(const Options& options);
  ~MoeCudaDevice() override;

  [[nodiscard]] std::int64_t most_consumers() const override { return options_.most_consumers; }
  [[nodiscard]] std::int64_t num_units() const override { return options_.num_sms; }
  [[nodiscard]] bool consumers_take_units() const override { return options_.partition == nullptr; }
  [[nodiscard]] TileSize choose_tile(std::span<const std::vector<std::int64_t>> groups, std::int64_t n,
                                     std::int64_t k, DType dtype, std::int64_t units) const override;
  void time_puts(bool on) override { options_.consumers->turn(on); }
  [[nodiscard]] std::int64_t put_calls() const override { return options_.consumers->calls(); }
  [[nodiscard]] std::optional<PutTimes> put_times(std::int64_t call) const override;
  void hold(void* stream) override;
  void start_clock(void* stream) override;
  void stop_clock(void* stream) override;
  [[nodiscard]] double clock_us() override;
  void check_address(std::string_view name, const void* address) const override;
  void* reserve(Buffer buffer, std::int64_t bytes) override;
  [[nodiscard]] std::int64_t reserved_bytes() const override;
  void poison(Buffer buffer, void* stream) override;
  void set_rows(const plan::MoeRowTables& tables) override;
  void* side_stream() override;
  void follow(void* stream, void* before) override;
  void gather(const void* x, std::int64_t ldx, std::int64_t cols, DType dtype, bool weighted, void* to,
              void* stream) override;
  void activate(const void* h, std::int64_t rows, std::int64_t cols, Activation activation, bool gated,
                DType dtype, void* activated, void* stream) override;
  void reduce(const void* results, std::int64_t cols, DType dtype, bool weighted, void* out, std::int64_t ldo,
              void* stream) override;
  void activate_backward(const void* h, const void* activated_gradient, std::int64_t rows, std::int64_t cols,
                         Activation activation, bool gated, DType dtype, void* h_gradient,
                         void* stream) override;
  void transpose(const void* from, std::int64_t count, std::int64_t rows, std::int64_t cols, void* to,
                 void* stream) override;
  void weight_gradient(const void* out_gradient, std::int64_t ldg, const void* results, std::int64_t cols,
                       DType dtype, float* gradient, void* stream) override;
  void set_expert_rows(const plan::MoeExpertRows& rows) override;
  void order_by_expert(const void* from, std::int64_t cols, void* to, void* stream) override;
  void multiply_by_expert(const void* left, std::int64_t left_cols, const void* right,
                          std::int64_t right_cols, DType dtype, float* to, void* stream) override;
  void end(void* stream) override;

 private:
  /// Of one call. Two take turns, so that a call's tables can be made while the call before still runs.
  struct Tables {
    DeviceBuffer words;  // source, place, result and weight, one after the other
    std::int64_t rows = 0;
    std::int64_t tokens = 0;
    std::int32_t top_k = 1;
    Event used;
    bool is_used = false;
    DeviceBuffer expert_rows;  // MoeExpertRows::row
    std::vector<std::int64_t> expert_begin;

    [[nodiscard]] const std::int32_t* source() const {
      return static_cast<const std::int32_t*>(words.data());
    }
    [[nodiscard]] const std::int32_t* place() const { return source() + rows; }
    [[nodiscard]] const std::int32_t* result() const { return place() + rows; }
    [[nodiscard]] const float* weight() const {
      return reinterpret_cast<const float*>(result() + tokens * top_k);
    }
    void wait() const;
  };

  [[nodiscard]] DeviceBuffer& at(Buffer buffer) { return buffers_[static_cast<std::size_t>(buffer)]; }

  /// On first use, so that a layer that only goes forward has none of it.
  CublasProducts& products();

  const Options options_;
  const int device_;
  std::array<DeviceBuffer, kNumBuffers> buffers_;
  std::array<Tables, 2> tables_;
  std::size_t current_ = 0;
  std::unique_ptr<CudaStream> side_;
  Event follow_;
  DeviceBuffer hold_begin_;
  Event clock_begin_, clock_end_;
  bool is_clocked_ = false;
  std::unique_ptr<CublasProducts> products_;
};

}  // namespace flashoverlap::cuda

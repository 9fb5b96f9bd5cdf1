// A layer of experts on one GPU: its memory, and the passes over rows between its GEMMs.
#pragma once

#include <array>
#include <memory>

#include "device.h"
#include "plan/moe_device.h"

namespace flashoverlap::cuda {

class MoeCudaDevice final : public plan::MoeDevice {
 public:
  /// `kind`: of memory that other ranks read.
  MoeCudaDevice(int device, DeviceMemory kind);
  ~MoeCudaDevice() override;

  void check_address(std::string_view name, const void* address) const override;
  void* reserve(Buffer buffer, std::int64_t bytes) override;
  [[nodiscard]] std::int64_t reserved_bytes() const override;
  void poison(Buffer buffer, void* stream) override;
  void set_rows(const plan::MoeRowTables& tables) override;
  void gather(const void* x, std::int64_t ldx, std::int64_t cols, DType dtype, void* to,
              void* stream) override;
  void activate(const void* h, std::int64_t rows, std::int64_t cols, Activation activation, bool gated,
                DType dtype, void* activated, void* stream) override;
  void reduce(const void* results, std::int64_t cols, DType dtype, void* out, std::int64_t ldo,
              void* stream) override;
  void end(void* stream) override;

 private:
  struct Tables {
    DeviceBuffer token, place, result, weight;
    std::int64_t rows = 0;
    std::int64_t tokens = 0;
    std::int32_t top_k = 1;
  };

  void wait_for_last_call() const;
  [[nodiscard]] DeviceBuffer& at(Buffer buffer) { return buffers_[static_cast<std::size_t>(buffer)]; }

  const int device_;
  const DeviceMemory kind_;
  std::array<DeviceBuffer, kNumBuffers> buffers_;
  Tables tables_;
  Event last_call_;
  bool has_call_ = false;
};

}  // namespace flashoverlap::cuda

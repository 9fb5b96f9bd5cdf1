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
  /// Of one call. Two take turns, so that a call's tables can be made while the call before still runs.
  struct Tables {
    DeviceBuffer words;  // token, place, result and weight, one after the other
    std::int64_t rows = 0;
    std::int64_t tokens = 0;
    std::int32_t top_k = 1;
    Event used;
    bool is_used = false;

    [[nodiscard]] const std::int32_t* token() const { return static_cast<const std::int32_t*>(words.data()); }
    [[nodiscard]] const std::int32_t* place() const { return token() + rows; }
    [[nodiscard]] const std::int32_t* result() const { return place() + rows; }
    [[nodiscard]] const float* weight() const {
      return reinterpret_cast<const float*>(result() + tokens * top_k);
    }
    void wait() const;
  };

  [[nodiscard]] DeviceBuffer& at(Buffer buffer) { return buffers_[static_cast<std::size_t>(buffer)]; }

  const int device_;
  const DeviceMemory kind_;
  std::array<DeviceBuffer, kNumBuffers> buffers_;
  std::array<Tables, 2> tables_;
  std::size_t current_ = 0;
};

}  // namespace flashoverlap::cuda

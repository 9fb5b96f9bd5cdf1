// One signal GEMM with everything that it needs, and what must come out of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device_plan.h"
#include "flashoverlap/plan.h"
#include "gemm_reference.h"
#include "signal_gemm.h"

namespace flashoverlap::gpu_test {

/// Those that run on device 0, of both types.
std::vector<const cuda::SignalGemmVariant*> all_variants();

/// Element distances beyond the row length, and pointer offsets, in elements: for operands that are not
/// aligned.
struct Strides {
  int lda_extra = 0;
  int ldb_extra = 0;
  int ldd_extra = 0;
  int offset = 0;  ///< of A and B from a 256-byte boundary
};

class GemmCase {
 public:
  /// Operands of small integers, poisoned outputs with guards, the plan's tables on device 0.
  GemmCase(OverlapPlan plan, const cuda::SignalGemmVariant& variant, int num_weights, int num_sms,
           const Strides& strides, std::uint64_t seed);

  void poison(cudaStream_t stream) const;
  /// Through placement and counted.
  void launch(cudaStream_t stream) const { gemm_->launch(stream); }
  /// Everything in place of a row-major D, not counted.
  void launch_plain(cudaStream_t stream) const { plain_->launch(stream); }

  /// Throws (a failed test) where packed buffer or D are not what the plan says, guards included.
  void expect_packed(const std::string& what) const;
  void expect_plain(const std::string& what) const;
  /// Throws where a counter is not at its target, or where it is not zero.
  void expect_counters_full(const std::string& what) const;
  void expect_counters_zero(const std::string& what) const;

  [[nodiscard]] const OverlapPlan& plan() const { return plan_; }
  [[nodiscard]] const cuda::DevicePlan& tables() const { return *tables_; }
  [[nodiscard]] std::uint16_t* packed() const { return static_cast<std::uint16_t*>(packed_.data()) + kGuard; }
  /// The whole packed buffer as it must be, on the device.
  [[nodiscard]] const std::uint16_t* expected_packed() const {
    return static_cast<const std::uint16_t*>(expected_packed_.data()) + kGuard;
  }
  /// First element and number of elements of a group in the packed buffer.
  struct Range {
    std::int64_t begin = 0;
    std::int64_t count = 0;
  };
  [[nodiscard]] Range packed_range(std::int64_t group) const;

 private:
  static constexpr std::int64_t kGuard = 2048;  // elements before and after each output
  void make_expected(const std::vector<std::uint16_t>& product);

  OverlapPlan plan_;
  std::int64_t m_ = 0, n_ = 0, k_ = 0, ldd_ = 0;
  cuda::DeviceBuffer a_, b_, packed_, output_, expected_packed_;
  std::vector<std::uint16_t> expected_packed_host_, expected_output_host_, expected_plain_host_;
  std::unique_ptr<cuda::DevicePlan> tables_;
  std::unique_ptr<cuda::PreparedGemm> gemm_, plain_;
};

}  // namespace flashoverlap::gpu_test

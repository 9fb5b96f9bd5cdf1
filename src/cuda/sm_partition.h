// Disjoint sets of SMs of one device (green contexts).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

namespace flashoverlap::cuda {

/// Some SMs of a device; streams made here run on no other. Partitions of one split never share an SM.
class SmPartition {
 public:
  ~SmPartition();
  SmPartition(const SmPartition&) = delete;
  SmPartition& operator=(const SmPartition&) = delete;

  [[nodiscard]] int device() const { return device_; }
  [[nodiscard]] int num_sms() const { return num_sms_; }
  /// A non-blocking stream on these SMs; the caller destroys it with cudaStreamDestroy before the partition
  /// goes.
  [[nodiscard]] cudaStream_t make_stream(int priority) const;
  /// Whether `stream` runs on these SMs.
  [[nodiscard]] bool has_stream(cudaStream_t stream) const;

 private:
  friend std::vector<std::shared_ptr<SmPartition>> split_sms(int device, const std::vector<int>& sizes);
  SmPartition(int device, std::vector<CUdevResource> groups);

  int device_;
  int num_sms_ = 0;
  CUgreenCtx context_ = nullptr;
};

/// SMs come in groups of this many (sm_90).
constexpr int kSmGroup = 8;

/// Partitions of the sizes given (multiples of 8). Error(kBadArgument) when they are not, or are more than
/// the device has in groups of 8 (an H200: 120 of its 132); Error(kUnsupported) without green contexts.
std::vector<std::shared_ptr<SmPartition>> split_sms(int device, const std::vector<int>& sizes);

/// SMs of a device that can be split: those in whole groups.
int splittable_sms(int device);

/// SMs of a device.
int num_sms(int device);

}  // namespace flashoverlap::cuda

#pragma once

#include <functional>
#include <vector>

#include "cuda/device.h"
#include "flashoverlap/communicator.h"
#include "matrices.h"

/// What runs on GPUs have in common: matrices there and back, and batches of calls that are timed.
namespace flashoverlap::cli {

/// A copy of `matrix` in the memory of `device`.
[[nodiscard]] cuda::DeviceBuffer on_device(int device, const Matrix& matrix);
/// Writes `matrix` over `to`, a copy of it.
void write_to(int device, cuda::DeviceBuffer& to, const Matrix& matrix);
/// Reads `matrix` from its copy, behind all that is in `stream`.
void read_from(const cuda::DeviceBuffer& from, Matrix& matrix, Stream& stream);

[[nodiscard]] cuda::DeviceBuffer on_device(int device, const std::vector<float>& values);
void write_to(int device, cuda::DeviceBuffer& to, const std::vector<float>& values);
void read_from(const cuda::DeviceBuffer& from, std::vector<float>& values, Stream& stream);

/// Times batches of calls in a stream of the device that is current where it is made.
class BatchTimer {
 public:
  /// Microseconds of one of `calls` calls back to back, the slowest rank's; the same on every rank.
  /// Collective.
  double time_us(Communicator& communicator, Stream& stream, int calls, const std::function<void()>& call);

 private:
  cuda::Event begin_{true};
  cuda::Event end_{true};
};

}  // namespace flashoverlap::cli

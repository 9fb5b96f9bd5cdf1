// A CUDA stream as the library's Stream.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <functional>
#include <memory>

#include "flashoverlap/communicator.h"

namespace flashoverlap::cuda {

class SmPartition;

/// Throws what has gone wrong elsewhere (in the communicator) while a stream is waited for; does nothing
/// otherwise.
using ErrorPoll = std::function<void()>;

/// Waits by polling, because a blocking wait would never return when a collective has lost a rank.
class CudaStream final : public Stream {
 public:
  enum class Priority { kLow, kHigh };

  /// A stream of its own on `device`, or on the SMs of `partition` when that is not null.
  CudaStream(int device, Priority priority, std::shared_ptr<const SmPartition> partition = nullptr);
  /// Wraps a caller's stream, which must outlive this.
  CudaStream(int device, cudaStream_t stream);
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  [[nodiscard]] cudaStream_t get() const { return stream_; }
  [[nodiscard]] int device() const { return device_; }

  /// What `synchronize` calls between two looks at the stream.
  void set_error_poll(ErrorPoll poll) { poll_ = std::move(poll); }
  /// How long `synchronize` waits at most. Default: for ever, as far as the error poll lets it.
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  /// Throws Error(kDevice) for a CUDA error, what the error poll throws, Error(kTimeout).
  void synchronize() override;

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  bool owned_ = false;
  std::shared_ptr<const SmPartition> partition_;
  ErrorPoll poll_;
  std::chrono::milliseconds timeout_{0};
};

/// The CUDA stream behind `stream`. Error(kBadArgument) when it is a stream of another kind.
cudaStream_t cuda_stream_of(Stream& stream, const char* call);

}  // namespace flashoverlap::cuda

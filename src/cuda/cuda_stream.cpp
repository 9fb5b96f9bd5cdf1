#include "cuda_stream.h"

#include <thread>

#include "check.h"
#include "core/fail.h"
#include "device.h"
#include "sm_partition.h"

namespace flashoverlap::cuda {

CudaStream::CudaStream(int device, Priority priority, std::shared_ptr<const SmPartition> partition)
    : device_(device), owned_(true), partition_(std::move(partition)) {
  const DeviceScope scope(device);
  int lowest = 0;
  int highest = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  const int level = priority == Priority::kHigh ? highest : lowest;
  if (partition_ != nullptr) {
    stream_ = partition_->make_stream(level);
  } else {
    FLASHOVERLAP_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, level));
  }
}

CudaStream::CudaStream(int device, cudaStream_t stream) : device_(device), stream_(stream) {}

CudaStream::~CudaStream() {
  if (owned_) (void)cudaStreamDestroy(stream_);
}

void CudaStream::synchronize() {
  using Clock = std::chrono::steady_clock;
  const DeviceScope scope(device_);
  const auto begin = Clock::now();
  while (true) {
    const cudaError_t status = cudaStreamQuery(stream_);
    if (status != cudaErrorNotReady) {
      FLASHOVERLAP_CUDA_CHECK(status);
      // What was in the stream may have ended because the communicator was aborted.
      if (poll_) poll_();
      return;
    }
    if (poll_) poll_();
    const auto waited = Clock::now() - begin;
    if (timeout_.count() > 0 && waited > timeout_) {
      core::fail(ErrorKind::kTimeout, "a CUDA stream on device {} was not done after {} ms", device_,
                 timeout_.count());
    }
    // A short wait spins, a long one gives its core away.
    if (waited > std::chrono::milliseconds(2)) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

cudaStream_t cuda_stream_of(Stream& stream, const char* call) {
  auto* const cuda_stream = dynamic_cast<CudaStream*>(&stream);
  if (cuda_stream == nullptr) {
    core::fail(ErrorKind::kBadArgument,
               "{}: the stream is not a CUDA stream; make one with the communicator's make_stream", call);
  }
  return cuda_stream->get();
}

}  // namespace flashoverlap::cuda

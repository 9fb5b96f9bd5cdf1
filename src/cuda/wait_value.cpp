#include <cuda.h>

#include "check.h"
#include "driver.h"
#include "wait.h"

namespace flashoverlap::cuda {

void enqueue_write_value(std::uint32_t* address, std::uint32_t value, cudaStream_t stream) {
  static const auto write = driver_function<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32", 12000);
  check_driver(write(stream, reinterpret_cast<CUdeviceptr>(address), value, CU_STREAM_WRITE_VALUE_DEFAULT),
               "cuStreamWriteValue32");
}

void enqueue_wait_value(std::uint32_t* counter, std::uint32_t target, cudaStream_t stream) {
  if (target == 0) return;
  static const auto wait = driver_function<decltype(&cuStreamWaitValue32)>("cuStreamWaitValue32", 12000);
  const auto address = reinterpret_cast<CUdeviceptr>(counter);
  check_driver(wait(stream, address, target, CU_STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue32");
  enqueue_write_value(counter, 0, stream);
}

}  // namespace flashoverlap::cuda

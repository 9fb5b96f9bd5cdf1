#include "driver.h"

#include <cuda_runtime_api.h>

#include <string>

#include "check.h"
#include "flashoverlap/error.h"

namespace flashoverlap::cuda {

void* driver_function_address(const char* name, unsigned version) {
  void* pointer = nullptr;
  cudaDriverEntryPointQueryResult found{};
  FLASHOVERLAP_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &pointer, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || pointer == nullptr) {
    throw Error(ErrorKind::kUnsupported, std::string("this CUDA driver has no ") + name);
  }
  return pointer;
}

void check_driver(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  static const auto get_string = driver_function<decltype(&cuGetErrorString)>("cuGetErrorString", 6000);
  get_string(result, &text);
  throw Error(ErrorKind::kDevice, std::string(call) + ": " + (text != nullptr ? text : "unknown error") +
                                      " (" + std::to_string(static_cast<int>(result)) + ")");
}

}  // namespace flashoverlap::cuda

// Driver functions, found through the runtime: nothing links against the driver library, so that the library
// loads on machines without one.
#pragma once

#include <cuda.h>

namespace flashoverlap::cuda {

/// Address of a driver function in its form as of CUDA `version` (e.g. 12000). Throws Error(kUnsupported)
/// when the driver does not have it.
void* driver_function_address(const char* name, unsigned version);

template <class Function>
Function driver_function(const char* name, unsigned version) {
  return reinterpret_cast<Function>(driver_function_address(name, version));
}

/// Throws Error(kDevice) that names the call and the driver's text, unless `result` is CUDA_SUCCESS.
void check_driver(CUresult result, const char* call);

}  // namespace flashoverlap::cuda

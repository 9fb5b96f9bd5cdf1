// Small tables for kernels to read. Apart from device.h, because what includes the kernels of src/cuda takes
// minutes to compile.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

namespace flashoverlap::cuda {

/// A copy of `bytes` bytes of host memory on the current device, as long as anyone holds it; whoever lets it
/// go makes sure that the device is done with it. Returns when it is there. Throws Error(kOutOfMemory) naming
/// `purpose`.
[[nodiscard]] std::shared_ptr<const void> copy_to_device(const void* data, std::size_t bytes,
                                                         std::string_view purpose);

}  // namespace flashoverlap::cuda

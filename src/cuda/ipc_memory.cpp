#include "ipc_memory.h"

#include <cuda.h>

#include <algorithm>

#include "check.h"
#include "core/fail.h"
#include "driver.h"

namespace flashoverlap::cuda {
namespace {

struct Allocation {
  std::uint64_t base = 0;
  std::uint64_t id = 0;
};

Allocation allocation_of(const void* pointer) {
  static const auto get_range =
      driver_function<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange", 3020);
  static const auto get_attribute =
      driver_function<decltype(&cuPointerGetAttribute)>("cuPointerGetAttribute", 4000);
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  check_driver(get_range(&base, &bytes, address), "cuMemGetAddressRange");
  unsigned long long id = 0;
  check_driver(get_attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, base), "cuPointerGetAttribute");
  return {.base = base, .id = id};
}

}  // namespace

IpcMemory::~IpcMemory() {
  for (const auto& [owner, list] : opened_by_) {
    for (const Opened& opened : list) (void)cudaIpcCloseMemHandle(opened.here);
  }
}

SharedAddress IpcMemory::share(const void* pointer) {
  if (pointer == nullptr) return {};
  const Allocation allocation = allocation_of(pointer);
  Shared& shared = shared_[allocation.base];
  if (shared.allocation != allocation.id) {
    const cudaError_t status = cudaIpcGetMemHandle(&shared.handle, reinterpret_cast<void*>(allocation.base));
    if (status != cudaSuccess) {
      (void)cudaGetLastError();
      shared_.erase(allocation.base);
      core::fail(ErrorKind::kUnsupported,
                 "the memory at {} cannot be shared with other processes ({}): it must come from cudaMalloc, "
                 "not from a stream-ordered pool or PyTorch's expandable segments",
                 pointer, cudaGetErrorString(status));
    }
    shared.allocation = allocation.id;
  }
  return {.handle = shared.handle,
          .allocation = allocation.id,
          .base = allocation.base,
          .offset = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer) - allocation.base),
          .is_null = false};
}

// What is closed may still be read by what this rank has in its streams, and that waits for nothing that this
// host has not let go before: the ranks have met for all of it.
void IpcMemory::close(const Opened& opened) {
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceSynchronize());
  FLASHOVERLAP_CUDA_CHECK(cudaIpcCloseMemHandle(opened.here));
}

void* IpcMemory::open(int owner, const SharedAddress& address) {
  if (address.is_null) return nullptr;
  std::list<Opened>& list = opened_by_[owner];
  const auto found = std::find_if(list.begin(), list.end(),
                                  [&](const Opened& opened) { return opened.base == address.base; });
  if (found != list.end() && found->allocation == address.allocation) {
    list.splice(list.begin(), list, found);
    return static_cast<char*>(list.front().here) + address.offset;
  }
  if (found != list.end()) {  // its owner has freed it, which takes effect when nobody has it open
    close(*found);
    list.erase(found);
  } else if (list.size() == kMaxOpen) {
    close(list.back());
    list.pop_back();
  }
  void* here = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&here, address.handle, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    core::fail(ErrorKind::kUnsupported, "the memory of rank {} cannot be addressed from here ({}): use NCCL",
               owner, cudaGetErrorString(status));
  }
  list.push_front({.base = address.base, .allocation = address.allocation, .here = here});
  return static_cast<char*>(here) + address.offset;
}

}  // namespace flashoverlap::cuda

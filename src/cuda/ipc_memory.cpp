#include "ipc_memory.h"

#include <cuda.h>

#include "check.h"
#include "core/fail.h"
#include "driver.h"

namespace flashoverlap::cuda {
namespace {

struct Found {
  std::uint64_t base = 0;
  std::uint64_t id = 0;
};

Found allocation_of(const void* pointer) {
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
  for (const auto& [owner, allocations] : opened_) close_all_of(owner);
}

void IpcMemory::close_all_of(int owner) {
  for (const auto& [allocation, here] : opened_[owner]) (void)cudaIpcCloseMemHandle(here);
  opened_[owner].clear();
}

SharedAddress IpcMemory::share(const void* pointer) {
  if (pointer == nullptr) return {};
  const Found allocation = allocation_of(pointer);
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

void* IpcMemory::open(int owner, const SharedAddress& address) {
  if (address.is_null) return nullptr;
  std::map<Allocation, void*>& allocations = opened_[owner];
  const Allocation allocation{address.base, address.allocation};
  auto found = allocations.find(allocation);
  if (found == allocations.end()) {
    if (allocations.size() == kMaxOpen) {
      core::fail(ErrorKind::kOutOfMemory,
                 "rank {} has given more than {} allocations to others to read; use the same memory again",
                 owner, kMaxOpen);
    }
    void* here = nullptr;
    cudaError_t status = cudaIpcOpenMemHandle(&here, address.handle, cudaIpcMemLazyEnablePeerAccess);
    if (status == cudaErrorAlreadyMapped && !allocations.empty()) {
      (void)cudaGetLastError();
      close_all_of(owner);
      took_back_ = true;
      status = cudaIpcOpenMemHandle(&here, address.handle, cudaIpcMemLazyEnablePeerAccess);
    }
    if (status != cudaSuccess) {
      (void)cudaGetLastError();
      core::fail(ErrorKind::kUnsupported,
                 "the memory of rank {} cannot be addressed from here ({}): use NCCL", owner,
                 cudaGetErrorString(status));
    }
    found = allocations.emplace(allocation, here).first;
  }
  return static_cast<char*>(found->second) + address.offset;
}

}  // namespace flashoverlap::cuda

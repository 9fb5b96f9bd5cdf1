// Device memory of one process in the address space of another of the same host (CUDA IPC).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <utility>

namespace flashoverlap::cuda {

/// An address that other processes can use, in a form that may be copied between them as bytes.
struct SharedAddress {
  cudaIpcMemHandle_t handle{};   ///< Of the allocation that holds it.
  std::uint64_t allocation = 0;  ///< Differs between allocations of one process, also of the same address.
  std::uint64_t base = 0;        ///< Where the allocation begins in its own process.
  std::int64_t offset = 0;
  bool is_null = true;
};

/// Remembers what was shared and opened, since both take the driver long. One object for each rank and
/// device; not thread-safe. The device must be current.
class IpcMemory {
 public:
  IpcMemory() = default;
  ~IpcMemory();
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;

  /// Error(kUnsupported) for memory that is not from cudaMalloc; null stays null.
  SharedAddress share(const void* pointer);

  /// The same memory here, of rank `owner`, a process other than this. Stays open, since closing waits for
  /// the device, where a GEMM may be waiting for what is copied next; so memory that its owner frees is not
  /// free before that. Where the owner has since allocated anew what is still open here, which the driver
  /// refuses to open again, all of that owner's is closed first: see took_back. Error(kUnsupported) where
  /// this device cannot address it, Error(kOutOfMemory) for more than kMaxOpen allocations of one rank.
  void* open(int owner, const SharedAddress& address);

  /// Whether `open` has closed what it gave out before the last call of this: such addresses must be asked
  /// for again.
  bool took_back() { return std::exchange(took_back_, false); }

  static constexpr std::size_t kMaxOpen = 1024;

 private:
  struct Shared {
    std::uint64_t allocation = 0;
    cudaIpcMemHandle_t handle{};
  };
  using Allocation = std::pair<std::uint64_t, std::uint64_t>;  // where it begins, and which one there

  void close_all_of(int owner);

  std::map<std::uint64_t, Shared> shared_;             // by where it begins
  std::map<int, std::map<Allocation, void*>> opened_;  // by owner
  bool took_back_ = false;
};

}  // namespace flashoverlap::cuda

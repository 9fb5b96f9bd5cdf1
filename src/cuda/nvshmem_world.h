// NVSHMEM of this process.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "flashoverlap/communicator.h"
#include "slab.h"

namespace flashoverlap::cuda {

/// What processes that were initialised together have: one stretch of the symmetric heap on each of them,
/// allocated once. Its parts each process hands out by itself, so ranks may want memory of different sizes,
/// and groups of some of the processes may want it, while NVSHMEM's own allocation is a collective of all.
///
/// Lives as long as the process: nvshmem_finalize is a collective, too, and a rank may have died.
class NvshmemWorld {
 public:
  NvshmemWorld(const NvshmemWorld&) = delete;
  NvshmemWorld& operator=(const NvshmemWorld&) = delete;

  /// Collective, on the host. The first call in a process initialises NVSHMEM for the ranks of
  /// `communicator`, with a stretch of the most bytes that any of them asks for; later ones may be of the
  /// same processes or some of them, and find what is there. Throws, on every rank: Error(kUnsupported)
  /// without the library, where ranks are threads of one process, processes were not all initialised
  /// together, or something else has initialised NVSHMEM; Error(kOutOfMemory) naming the bytes;
  /// Error(kTimeout) where NVSHMEM does not come back.
  static NvshmemWorld& join(Communicator& communicator, int device, std::int64_t bytes);

  [[nodiscard]] int pe() const { return pe_; }
  [[nodiscard]] const char* begin() const { return static_cast<const char*>(memory_); }
  /// Where the stretch of processing element `pe` begins for kernels of this one; null where they cannot
  /// reach it.
  [[nodiscard]] char* begin_of(int pe) const;

  /// A part of this process's stretch. Throws Error(kOutOfMemory).
  [[nodiscard]] std::shared_ptr<void> allocate(std::int64_t bytes, std::string_view purpose);

 private:
  NvshmemWorld(std::uint64_t id, int device, int pe, void* memory, std::int64_t bytes)
      : id_(id), device_(device), pe_(pe), memory_(memory), slab_(bytes) {}

  static std::unique_ptr<NvshmemWorld>& of_this_process();
  static void initialise(Communicator& communicator, int device, std::int64_t bytes);

  std::uint64_t id_;
  int device_;
  int pe_;
  void* memory_;
  std::mutex mutex_;
  Slab slab_;
};

}  // namespace flashoverlap::cuda

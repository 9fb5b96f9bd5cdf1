#include "nvshmem_world.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <thread>

#include "comm/run_on_all.h"
#include "core/fail.h"
#include "device.h"
#include "nvshmem_library.h"

namespace flashoverlap::cuda {
namespace {

constexpr std::string_view kWhat = "NVSHMEM";

// What each rank says of its process before anything is called that waits for all.
struct Standing {
  std::uint64_t world = 0;  // 0: not initialised
  std::int64_t bytes = 0;   // asked for
};

std::vector<Standing> exchange(Communicator& communicator, const Standing& own) {
  const std::string bytes(reinterpret_cast<const char*>(&own), sizeof own);
  std::vector<Standing> all;
  for (const std::string& standing : communicator.exchange(bytes, {.operation = kWhat}))
    std::memcpy(&all.emplace_back(), standing.data(), sizeof own);
  return all;
}

// Not the process's number, which containers on two hosts may have in common.
std::uint64_t token_of_process() {
  static const std::uint64_t token = [] {
    std::random_device random;
    return std::uint64_t{random()} << 32U | random();
  }();
  return token;
}

void require_processes(Communicator& communicator) {
  const std::vector<std::uint64_t> processes =
      communicator.exchange(token_of_process(), {.operation = kWhat});
  for (std::size_t r = 1; r < processes.size(); ++r) {
    const auto first = std::find(processes.begin(), processes.end(), processes[r]) - processes.begin();
    if (first == static_cast<std::ptrdiff_t>(r)) continue;
    core::fail(ErrorKind::kUnsupported,
               "NVSHMEM: ranks {} and {} are threads of one process, which can be only one of NVSHMEM's "
               "processing elements; start a process for each rank, or use PutMemory::kCommunicator",
               first, r);
  }
}

// NVSHMEM's collectives have no time-out, and a rank may die after it has agreed to take part. The thread of
// one that does not come back is left alone.
template <class Result>
Result within(std::chrono::milliseconds timeout, int device, const char* call,
              std::function<Result()> function) {
  std::packaged_task<Result()> task([device, function = std::move(function)] {
    const DeviceScope scope(device);
    return function();
  });
  std::future<Result> result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_for(timeout) != std::future_status::ready) {
    core::fail(ErrorKind::kTimeout, "{} did not come back within {} ms; has a rank died?", call,
               timeout.count());
  }
  return result.get();
}

NvshmemUniqueId share_unique_id(Communicator& communicator) {
  NvshmemUniqueId id;
  comm::run_on_all(communicator, kWhat, [&] {
    if (communicator.rank() != 0) return;
    if (const int status = nvshmem().get_unique_id(&id); status != 0)
      core::fail(ErrorKind::kCommunication, "nvshmemx_get_uniqueid failed with {}", status);
  });
  const std::string bytes(reinterpret_cast<const char*>(&id), sizeof id);
  std::memcpy(&id, communicator.exchange(bytes, {.operation = kWhat}).front().data(), sizeof id);
  return id;
}

void start(Communicator& communicator, int device, NvshmemUniqueId id) {
  const auto call = [&library = nvshmem(), rank = communicator.rank(), size = communicator.size(), id] {
    NvshmemUniqueId own = id;
    NvshmemAttributes attributes;
    const int status = library.set_unique_id(rank, size, &own, &attributes);
    return status != 0 ? status : library.init(kNvshmemInitWithUniqueId, &attributes);
  };
  const int status = within<int>(communicator.timeout(), device, "nvshmemx_hostlib_init_attr", call);
  if (status == 0 && nvshmem().init_status() >= kNvshmemIsInitialized) return;
  core::fail(ErrorKind::kCommunication,
             "nvshmemx_hostlib_init_attr failed with {} (initialisation status {}); NVSHMEM_DEBUG=WARN says "
             "more",
             status, nvshmem().init_status());
}

void* allocate_on_all(Communicator& communicator, int device, std::int64_t bytes) {
  const auto call = [&library = nvshmem(), bytes] {
    return library.allocate(static_cast<std::size_t>(bytes));
  };
  void* const memory = within<void*>(communicator.timeout(), device, "nvshmem_malloc", call);
  if (memory != nullptr) return memory;
  core::fail(ErrorKind::kOutOfMemory,
             "NVSHMEM has not {} bytes of symmetric heap (CudaOptions::put_memory_bytes); with "
             "NVSHMEM_DISABLE_CUDA_VMM the heap has NVSHMEM_SYMMETRIC_SIZE",
             bytes);
}

}  // namespace

std::unique_ptr<NvshmemWorld>& NvshmemWorld::of_this_process() {
  // Never destroyed: blocks may be given back as late as the program's own static objects go.
  static auto* const world = new std::unique_ptr<NvshmemWorld>;
  return *world;
}

NvshmemWorld& NvshmemWorld::join(Communicator& communicator, int device, std::int64_t bytes) {
  require_processes(communicator);
  const NvshmemWorld* const joined = of_this_process().get();
  comm::run_on_all(communicator, kWhat, [&] {
    if (bytes < 1) core::fail(ErrorKind::kBadArgument, "put_memory_bytes is {}, must be >= 1", bytes);
    if (joined != nullptr && joined->device_ != device) {
      core::fail(ErrorKind::kUnsupported, "device is {}, this process has initialised NVSHMEM on device {}",
                 device, joined->device_);
    }
    const bool is_foreign = nvshmem().init_status() != 0 && joined == nullptr;
    if (is_foreign) {
      core::fail(
          ErrorKind::kUnsupported,
          "NVSHMEM is initialised in this process already, by something else or by a call that failed");
    }
  });
  std::int64_t most = 0;
  const std::vector<Standing> all =
      exchange(communicator, {.world = joined == nullptr ? 0 : joined->id_, .bytes = bytes});
  for (std::size_t r = 0; r < all.size(); ++r) {
    most = std::max(most, all[r].bytes);
    if (all[r].world == all.front().world) continue;
    core::fail(ErrorKind::kUnsupported,
               "NVSHMEM: ranks 0 and {} have not been initialised together; make an executor with "
               "PutMemory::kNvshmem for all ranks first",
               r);
  }
  if (joined == nullptr) initialise(communicator, device, most);
  return *of_this_process();
}

void NvshmemWorld::initialise(Communicator& communicator, int device, std::int64_t bytes) {
  const NvshmemUniqueId id = share_unique_id(communicator);
  comm::run_on_all(communicator, kWhat, [&] { start(communicator, device, id); });
  void* memory = nullptr;
  comm::run_on_all(communicator, kWhat, [&] { memory = allocate_on_all(communicator, device, bytes); });
  const std::size_t hash = std::hash<std::string_view>{}({id.internal, sizeof id.internal});
  of_this_process().reset(new NvshmemWorld(hash | 1, device, nvshmem().my_pe(), memory, bytes));
}

char* NvshmemWorld::begin_of(int pe) const {
  return static_cast<char*>(nvshmem().pointer(memory_, pe));
}

std::shared_ptr<void> NvshmemWorld::allocate(std::int64_t bytes, std::string_view purpose) {
  const std::scoped_lock lock(mutex_);
  const std::optional<std::int64_t> offset = slab_.take(bytes);
  if (!offset) {
    core::fail(ErrorKind::kOutOfMemory,
               "{}: {} bytes are needed of NVSHMEM's memory, of {} that this process took at first "
               "(CudaOptions::put_memory_bytes) at most {} are free in one piece",
               purpose, bytes, slab_.bytes(), slab_.longest_free());
  }
  return {static_cast<char*>(memory_) + *offset, [this, at = *offset](void*) {
            const std::scoped_lock giving_back(mutex_);
            slab_.give_back(at);
          }};
}

}  // namespace flashoverlap::cuda

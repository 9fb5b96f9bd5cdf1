#include "nccl_library.h"

#include <cstdlib>

#include "runtime_library.h"

namespace flashoverlap::cuda {
namespace {

constexpr int kOldestVersion = 21'800;

template <class Function>
void find(void* library, const std::string& path, Function& function, const char* name) {
  find_function(library, path, function, name, "NCCL 2.18");
}

template <class Function>
void find_optional(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

NcclLibrary load() {
  constexpr int kKeepExisting = 0;
  (void)setenv("NCCL_RUNTIME_CONNECT", "0", kKeepExisting);
  (void)setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", kKeepExisting);

  NcclLibrary found;
  found.path = chosen_library("FLASHOVERLAP_NCCL_LIBRARY", "libnccl.so.2");
  void* const library = dlopen(found.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    core::fail(ErrorKind::kUnsupported,
               "NCCL cannot be loaded: {} (set FLASHOVERLAP_NCCL_LIBRARY or LD_LIBRARY_PATH)",
               why == nullptr ? "unknown reason" : why);
  }
  find(library, found.path, found.get_version, "ncclGetVersion");
  found.get_version(&found.version);
  if (found.version < kOldestVersion) {
    core::fail(ErrorKind::kUnsupported, "{} is NCCL {}; {} or later is needed", found.path,
               library_version_text(found.version), library_version_text(kOldestVersion));
  }
  find(library, found.path, found.error_string, "ncclGetErrorString");
  find(library, found.path, found.last_error, "ncclGetLastError");
  find(library, found.path, found.get_unique_id, "ncclGetUniqueId");
  find(library, found.path, found.comm_init_rank_config, "ncclCommInitRankConfig");
  find(library, found.path, found.comm_destroy, "ncclCommDestroy");
  find(library, found.path, found.comm_abort, "ncclCommAbort");
  find(library, found.path, found.comm_get_async_error, "ncclCommGetAsyncError");
  find(library, found.path, found.group_start, "ncclGroupStart");
  find(library, found.path, found.group_end, "ncclGroupEnd");
  find(library, found.path, found.all_reduce, "ncclAllReduce");
  find(library, found.path, found.reduce_scatter, "ncclReduceScatter");
  find(library, found.path, found.reduce, "ncclReduce");
  find(library, found.path, found.all_gather, "ncclAllGather");
  find(library, found.path, found.broadcast, "ncclBroadcast");
  find(library, found.path, found.send, "ncclSend");
  find(library, found.path, found.receive, "ncclRecv");
  find_optional(library, found.mem_alloc, "ncclMemAlloc");
  find_optional(library, found.mem_free, "ncclMemFree");
  find_optional(library, found.comm_register, "ncclCommRegister");
  find_optional(library, found.comm_deregister, "ncclCommDeregister");
  find_optional(library, found.comm_window_register, "ncclCommWindowRegister");
  find_optional(library, found.comm_window_deregister, "ncclCommWindowDeregister");
  find_optional(library, found.comm_revoke, "ncclCommRevoke");
  return found;
}

}  // namespace

const NcclLibrary& nccl() {
  static const NcclLibrary library = load();
  return library;
}

}  // namespace flashoverlap::cuda

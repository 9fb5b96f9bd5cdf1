#include "nvshmem_library.h"

#include <cstdlib>

#include "runtime_library.h"

namespace flashoverlap::cuda {
namespace {

template <class Function>
void find(void* library, const std::string& path, Function& function, const char* name) {
  find_function(library, path, function, name, "NVSHMEM " + library_version_text(kOldestNvshmemVersion));
}

int version_of(void* library, const std::string& path) {
  void (*get_version)(int* major, int* minor, int* patch) = nullptr;
  find(library, path, get_version, "nvshmemx_vendor_get_version_info");
  int major = 0;
  int minor = 0;
  int patch = 0;
  get_version(&major, &minor, &patch);
  return major * 10'000 + minor * 100 + patch;
}

}  // namespace

NvshmemLibrary load_nvshmem(const std::string& path) {
  constexpr int kKeepExisting = 0;
  (void)setenv("NVSHMEM_DISABLE_NVLS", "1", kKeepExisting);
  (void)setenv("NVSHMEM_DISABLE_NCCL", "1", kKeepExisting);

  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    core::fail(ErrorKind::kUnsupported,
               "NVSHMEM cannot be loaded from {}: {} (pip install nvidia-nvshmem-cu13 puts it into "
               "nvidia/nvshmem/lib; set FLASHOVERLAP_NVSHMEM_LIBRARY or LD_LIBRARY_PATH)",
               path, why == nullptr ? "unknown reason" : why);
  }
  NvshmemLibrary found;
  found.path = path;
  found.version = version_of(library, path);
  if (found.version < kOldestNvshmemVersion) {
    core::fail(ErrorKind::kUnsupported, "{} is NVSHMEM {}; {} or later is needed", path,
               library_version_text(found.version), library_version_text(kOldestNvshmemVersion));
  }
  find(library, path, found.get_unique_id, "nvshmemx_get_uniqueid");
  find(library, path, found.set_unique_id, "nvshmemx_set_attr_uniqueid_args");
  find(library, path, found.init, "nvshmemx_hostlib_init_attr");
  find(library, path, found.init_status, "nvshmemx_init_status");
  find(library, path, found.my_pe, "nvshmem_my_pe");
  find(library, path, found.allocate, "nvshmem_malloc");
  find(library, path, found.pointer, "nvshmem_ptr");
  return found;
}

const NvshmemLibrary& nvshmem() {
  static const NvshmemLibrary library =
      load_nvshmem(chosen_library("FLASHOVERLAP_NVSHMEM_LIBRARY", "libnvshmem_host.so.3"));
  return library;
}

}  // namespace flashoverlap::cuda

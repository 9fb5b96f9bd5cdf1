// NVSHMEM's host library, loaded at run time as NCCL is. What we call of it is declared here, so that the
// build needs nothing of NVSHMEM.
#pragma once

#include <cstddef>
#include <string>

namespace flashoverlap::cuda {

/// nvshmemx_uniqueid_t: what ranks find each other by.
struct NvshmemUniqueId {
  int version = (1 << 16) + 128;
  char internal[124] = {};
};
static_assert(sizeof(NvshmemUniqueId) == 128);

/// nvshmemx_init_attr_t, as nvshmemx_set_attr_uniqueid_args fills it in.
struct NvshmemAttributes {
  int version = (1 << 16) + 144;
  void* mpi_communicator = nullptr;
  int arguments_version = (1 << 16) + 128;
  struct {
    int version = (1 << 16) + 24;
    NvshmemUniqueId* id = nullptr;
    int rank = -1;
    int num_ranks = -1;
  } by_unique_id;
  char content[96] = {};
};
static_assert(sizeof(NvshmemAttributes) == 144);

constexpr unsigned kNvshmemInitWithUniqueId = 1U << 3;
/// Of init_status, from here on: NVSHMEM has its heap; more where several processes share a GPU.
constexpr int kNvshmemIsInitialized = 2;

/// The functions of libnvshmem_host.so.3 that we call. 0: success.
struct NvshmemLibrary {
  int (*get_unique_id)(NvshmemUniqueId* id);
  int (*set_unique_id)(int rank, int num_ranks, const NvshmemUniqueId* id, NvshmemAttributes* attributes);
  int (*init)(unsigned flags, NvshmemAttributes* attributes);  ///< nvshmemx_hostlib_init_attr
  int (*init_status)();
  int (*my_pe)();
  void* (*allocate)(std::size_t bytes);          ///< nvshmem_malloc
  void* (*pointer)(const void* memory, int pe);  ///< nvshmem_ptr
  int version = 0;                               ///< 30405 is 3.4.5.
  std::string path;                              ///< What was loaded.
};

/// The version that this was written for and tried with.
constexpr int kOldestNvshmemVersion = 30'405;

/// Loads FLASHOVERLAP_NVSHMEM_LIBRARY if set, otherwise libnvshmem_host.so.3 from where the loader looks.
/// Before that sets, unless the environment has them already, NVSHMEM_DISABLE_NVLS=1 and
/// NVSHMEM_DISABLE_NCCL=1: both serve collectives of its own, which nobody calls here. Error(kUnsupported)
/// when there is no library, or it is older than kOldestNvshmemVersion, or lacks a function.
const NvshmemLibrary& nvshmem();
/// The same from this path. For tests.
NvshmemLibrary load_nvshmem(const std::string& path);

}  // namespace flashoverlap::cuda

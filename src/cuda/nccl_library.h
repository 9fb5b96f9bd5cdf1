// NCCL, loaded at run time: the build needs its header only, and whatever version the user has installed
// works.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <string>

namespace flashoverlap::cuda {

/// ncclWindow_t; NCCL leaves it null where it cannot open one.
using NcclWindow = void*;
/// NCCL_WIN_COLL_SYMMETRIC: collectives find what they move at the same offset of every rank's window.
constexpr int kNcclSymmetricWindow = 0x01;

/// The functions of libnccl.so.2 that we call, under their own names.
struct NcclLibrary {
  decltype(&::ncclGetVersion) get_version;
  decltype(&::ncclGetErrorString) error_string;
  decltype(&::ncclGetLastError) last_error;
  decltype(&::ncclGetUniqueId) get_unique_id;
  decltype(&::ncclCommInitRankConfig) comm_init_rank_config;
  decltype(&::ncclCommDestroy) comm_destroy;
  decltype(&::ncclCommAbort) comm_abort;
  decltype(&::ncclCommGetAsyncError) comm_get_async_error;
  decltype(&::ncclGroupStart) group_start;
  decltype(&::ncclGroupEnd) group_end;
  decltype(&::ncclAllReduce) all_reduce;
  decltype(&::ncclReduceScatter) reduce_scatter;
  decltype(&::ncclReduce) reduce;
  decltype(&::ncclAllGather) all_gather;
  decltype(&::ncclBroadcast) broadcast;
  decltype(&::ncclSend) send;
  decltype(&::ncclRecv) receive;
  // Null where the library is older than the version named. Written out, since the build's header may be
  // older than the library.
  ncclResult_t (*mem_alloc)(void** memory, std::size_t bytes) = nullptr;  // 2.19, as the next three
  ncclResult_t (*mem_free)(void* memory) = nullptr;
  ncclResult_t (*comm_register)(ncclComm_t comm, void* memory, std::size_t bytes, void** handle) = nullptr;
  ncclResult_t (*comm_deregister)(ncclComm_t comm, void* handle) = nullptr;
  ncclResult_t (*comm_window_register)(ncclComm_t comm, void* memory, std::size_t bytes, NcclWindow* window,
                                       int flags) = nullptr;  // 2.27, as the next one
  ncclResult_t (*comm_window_deregister)(ncclComm_t comm, NcclWindow window) = nullptr;
  ncclResult_t (*comm_revoke)(ncclComm_t comm, int flags) = nullptr;  // ends what is on the device, no more
  int version = 0;   ///< As ncclGetVersion gives it: 23007 is 2.30.7.
  std::string path;  ///< What was loaded.
};

/// Version 2.30.7: from here on several ranks may share a GPU.
constexpr int kNcclSharedGpuVersion = 23'007;
/// From here on memory can be registered (2.19), opened as a window (2.27), and a communicator that knows
/// such memory be ended when a rank has gone (comm_revoke; the first version seen to have it).
constexpr int kNcclBuffersVersion = 23'007;

/// Loads FLASHOVERLAP_NCCL_LIBRARY if set, otherwise libnccl.so.2 from where the loader looks. Before that
/// sets, unless the environment has them already: NCCL_RUNTIME_CONNECT=0 (connections made inside a later
/// call would allocate memory behind a stream that waits) and NCCL_MULTI_RANK_GPU_ENABLE=1 (lets ranks share
/// a GPU). Error(kUnsupported) when there is no library, or it is older than 2.18, or lacks a function.
const NcclLibrary& nccl();

}  // namespace flashoverlap::cuda

// NCCL, loaded at run time: the build needs its header only, and whatever version the user has installed
// works.
#pragma once

#include <nccl.h>

#include <string>

namespace flashoverlap::cuda {

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
  int version = 0;   ///< As ncclGetVersion gives it: 23007 is 2.30.7.
  std::string path;  ///< What was loaded.
};

/// Version 2.30.7: from here on several ranks may share a GPU.
constexpr int kNcclSharedGpuVersion = 23'007;

/// Loads FLASHOVERLAP_NCCL_LIBRARY if set, otherwise libnccl.so.2 from where the loader looks. Before that
/// sets, unless the environment has them already: NCCL_RUNTIME_CONNECT=0 (connections made inside a later
/// call would allocate memory behind a stream that waits) and NCCL_MULTI_RANK_GPU_ENABLE=1 (lets ranks share
/// a GPU). Error(kUnsupported) when there is no library, or it is older than 2.18, or lacks a function.
const NcclLibrary& nccl();

/// "2.30.7"
std::string nccl_version_text(int version);

}  // namespace flashoverlap::cuda

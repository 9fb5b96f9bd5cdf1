#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "flashoverlap/cuda_context.h"
#include "flashoverlap/operators.h"

/// The library's GPU half, or errors in its place: gpu_cuda.cpp in builds with CUDA, gpu_absent.cpp in
/// others.
namespace flashoverlap::python {

/// Where the ranks of one process compute.
struct GpuRanks {
  std::vector<int> devices;     ///< Of each rank; may repeat.
  int communication_sms = 16;   ///< As CudaOptions; shared by the ranks of a device.
  int compute_sms = 0;          ///< Of each rank that shares its device; a multiple of 8.
  bool by_copy_engine = false;  ///< PeerCopy::kCopyEngine and SumBy::kRestore.
};

[[nodiscard]] bool built_with_cuda();
/// Usable devices; 0 in builds without CUDA.
[[nodiscard]] int gpu_count();

// All below throw Error(kUnsupported) in builds without CUDA, or without a device.

/// One for each rank. Ranks that share a device get SMs of their own (make_rehearsal).
[[nodiscard]] std::vector<CudaOptions> place_on_gpus(const GpuRanks& ranks);
/// Communicators for threads that read each other's memory.
[[nodiscard]] std::vector<std::shared_ptr<Communicator>> make_peer_communicators(const GpuRanks& ranks,
                                                                                 const LinkModel& link);
/// The same for this process's rank of `control`, on the first of `ranks.devices`. Collective.
[[nodiscard]] std::shared_ptr<Communicator> make_peer_communicator(std::shared_ptr<Communicator> control,
                                                                   const GpuRanks& ranks);
/// Collective over `control`.
[[nodiscard]] std::shared_ptr<Communicator> make_nccl(std::shared_ptr<Communicator> control, int device,
                                                      int max_ctas);
[[nodiscard]] std::unique_ptr<Context> make_gpu_context(std::shared_ptr<Communicator> communicator,
                                                        const CudaOptions& options);

/// Rows in the memory of one device.
struct DeviceRows {
  const std::byte* from = nullptr;
  std::size_t from_stride = 0;  ///< Bytes.
  std::byte* to = nullptr;
  std::size_t to_stride = 0;
  std::size_t row_bytes = 0;
  std::size_t rows = 0;
};
/// Puts the copy into `stream`, a cudaStream_t of the device.
void copy_on_gpu(int device, const DeviceRows& rows, void* stream);

}  // namespace flashoverlap::python

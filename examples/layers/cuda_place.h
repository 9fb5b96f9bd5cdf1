#pragma once

#include <flashoverlap/cuda_context.h>

#include <functional>

#include "cuda/device.h"
#include "layer.h"

/// A layer's matrices and its local attention on a GPU. Only in builds with CUDA.
namespace flashoverlap::layers {

/// `options`: of the executor of `context`. Everything is put into `stream`, one on the rank's SMs
/// (make_cuda_stream). Both, and the context, must outlive the place. `memory`: kShareable where ranks are
/// processes.
std::unique_ptr<Place> make_cuda_place(Context& context, const CudaOptions& options, Stream& stream,
                                       DType dtype,
                                       cuda::DeviceMemory memory = cuda::DeviceMemory::kStreamOrdered);

/// Calls `on_rank` on a thread for each of `ranks` ranks, in bf16: on a GPU each, or on the first one for all
/// where there are fewer. They read each other's memory, so that NCCL is not needed. Error(kUnsupported)
/// without a GPU.
void run_on_gpus(int ranks, const std::function<void(Place&)>& on_rank);

}  // namespace flashoverlap::layers

#include "core/fail.h"
#include "gpu.h"

namespace flashoverlap::python {
namespace {

[[noreturn]] void fail_without_cuda() {
  core::fail(ErrorKind::kUnsupported,
             "this package was built without CUDA; build it with pip install . "
             "--config-settings=cmake.define.FLASHOVERLAP_CUDA=ON");
}

}  // namespace

bool built_with_cuda() {
  return false;
}

int gpu_count() {
  return 0;
}

std::vector<CudaOptions> place_on_gpus(const GpuRanks& /*ranks*/) {
  fail_without_cuda();
}

std::vector<std::shared_ptr<Communicator>> make_peer_communicators(const GpuRanks& /*ranks*/,
                                                                   const LinkModel& /*link*/) {
  fail_without_cuda();
}

std::shared_ptr<Communicator> make_peer_communicator(std::shared_ptr<Communicator> /*control*/,
                                                     const GpuRanks& /*ranks*/) {
  fail_without_cuda();
}

std::shared_ptr<Communicator> make_nccl(std::shared_ptr<Communicator> /*control*/, int /*device*/,
                                        int /*max_ctas*/) {
  fail_without_cuda();
}

std::unique_ptr<Context> make_gpu_context(std::shared_ptr<Communicator> /*communicator*/,
                                          const CudaOptions& /*options*/) {
  fail_without_cuda();
}

void copy_on_gpu(int /*device*/, const DeviceRows& /*rows*/, void* /*stream*/) {
  fail_without_cuda();
}

}  // namespace flashoverlap::python

// gpu_test [FILTER]: all tests whose name contains FILTER. Exit code 0: none failed. Without a CUDA device
// none run, and it says so.
#include <cstdio>
#include <cstdlib>

#include "flashoverlap/cuda_context.h"
#include "gpu_ranks.h"
#include "gpu_test.h"

int main(int argc, char** argv) {
  // Before CUDA starts. Lazy loading of a kernel behind a stream that waits hangs; ranks that share a GPU
  // need a queue for each of their streams.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  if (flashoverlap::cuda_device_count() == 0) {
    std::printf("skipped: no CUDA device\n");
    return 0;
  }
  const int failed = flashoverlap::gpu_test::run_tests(argc > 1 ? argv[1] : "");
  flashoverlap::gpu_test::release_shared_groups();
  return failed == 0 ? 0 : 1;
}

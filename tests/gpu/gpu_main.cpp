// gpu_test [--devices LIST|all] [FILTER]: all tests whose name contains one of FILTER's comma-separated parts
// and none of those that begin with '-'. Exit code 0: none failed. Without a CUDA device none run, and it
// says so.
//
// --devices: rank r of a group runs on the r-th of these devices, where there are as many; otherwise all on
// device 0. Started by a launcher as one of several processes (FLASHOVERLAP_RANK, torchrun, …), it is one
// rank, on the device of its local rank, and runs the tests that work so.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "device.h"
#include "flashoverlap/cuda_context.h"
#include "flashoverlap/launcher.h"
#include "gpu_ranks.h"
#include "gpu_test.h"

namespace {

using namespace flashoverlap;

std::vector<int> parse_devices(const std::string& text) {
  std::vector<int> devices;
  if (text == "all") {
    for (int device = 0; device < cuda_device_count(); ++device) devices.push_back(device);
    return devices;
  }
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    std::size_t used = 0;
    const int device = part.empty() ? -1 : std::stoi(part, &used);
    if (used != part.size() || device < 0 || device >= cuda_device_count())
      throw std::runtime_error("--devices: '" + part + "' is not a device of this machine");
    devices.push_back(device);
    begin = end + 1;
  }
  return devices;
}

int run(int argc, char** argv) {
  std::string filter;
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--devices") {
      if (++i == argc) throw std::runtime_error("--devices has no value");
      gpu_test::use_devices(parse_devices(argv[i]));
    } else {
      filter = argv[i];
    }
  }
  const auto launch = detect_launch();
  if (launch && launch->world_size > 1) gpu_test::use_processes(*launch);
  const int failed = gpu_test::run_tests(filter);
  gpu_test::release_shared_groups();
  gpu_test::leave_processes();
  return failed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  cuda::prepare_environment();
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  if (cuda_device_count() == 0) {
    std::printf("skipped: no CUDA device\n");
    return 0;
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_test: %s\n", error.what());
    return 2;
  }
}

#include "gpu_probe.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstddef>
#include <optional>

#include "cuda/driver_version.h"
#include "loaded_library.h"

namespace flashoverlap::cli {
namespace {

// Of CUdevice_attribute; builds without CUDA have no cuda.h.
constexpr int kMultiprocessorCount = 16;
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;

/// The functions of libcuda.so.1 that are asked; each returns 0 for success. A CUdevice is an int.
class Driver {
 public:
  [[nodiscard]] bool is_there() const {
    return init_ != nullptr && get_version_ != nullptr && count_ != nullptr && get_ != nullptr &&
           get_name_ != nullptr && get_attribute_ != nullptr && total_memory_ != nullptr &&
           reaches_ != nullptr;
  }
  [[nodiscard]] int init() const { return init_(0); }
  [[nodiscard]] int version() const {
    int version = 0;
    return get_version_(&version) == 0 ? version : 0;
  }
  [[nodiscard]] int count() const {
    int count = 0;
    return count_(&count) == 0 ? count : 0;
  }
  /// nullopt: the driver lists it and then does not give it away.
  [[nodiscard]] std::optional<Gpu> gpu(int number, int count) const {
    int device = 0;
    std::array<char, 256> name{};
    std::size_t bytes = 0;
    if (get_(&device, number) != 0 || get_name_(name.data(), static_cast<int>(name.size()), device) != 0 ||
        total_memory_(&bytes, device) != 0) {
      return std::nullopt;
    }
    constexpr double kGib = 1024.0 * 1024 * 1024;
    Gpu gpu{.name = name.data(),
            .compute_capability = fmt::format("{}.{}", attribute(kCapabilityMajor, device),
                                              attribute(kCapabilityMinor, device)),
            .sms = attribute(kMultiprocessorCount, device),
            .memory_gib = static_cast<double>(bytes) / kGib,
            .peers = {}};
    for (int other = 0; other < count; ++other) {
      int peer = 0;
      int reaches = 0;
      if (other != number && get_(&peer, other) == 0 && reaches_(&reaches, device, peer) == 0 && reaches != 0)
        gpu.peers.push_back(other);
    }
    return gpu;
  }

 private:
  [[nodiscard]] int attribute(int which, int device) const {
    int value = 0;
    return get_attribute_(&value, which, device) == 0 ? value : 0;
  }

  Library library_{"libcuda.so.1"};
  int (*init_)(unsigned) = library_.function<int(unsigned)>("cuInit");
  int (*get_version_)(int*) = library_.function<int(int*)>("cuDriverGetVersion");
  int (*count_)(int*) = library_.function<int(int*)>("cuDeviceGetCount");
  int (*get_)(int*, int) = library_.function<int(int*, int)>("cuDeviceGet");
  int (*get_name_)(char*, int, int) = library_.function<int(char*, int, int)>("cuDeviceGetName");
  int (*get_attribute_)(int*, int, int) = library_.function<int(int*, int, int)>("cuDeviceGetAttribute");
  int (*total_memory_)(std::size_t*, int) = library_.function<int(std::size_t*, int)>("cuDeviceTotalMem_v2");
  int (*reaches_)(int*, int, int) = library_.function<int(int*, int, int)>("cuDeviceCanAccessPeer");
};

}  // namespace

GpuProbe probe_gpus() {
  const Driver driver;
  GpuProbe probe;
  if (!driver.is_there()) {
    probe.reason = "no NVIDIA driver (libcuda.so.1) found";
    return probe;
  }
  probe.has_driver = true;
  probe.driver = cuda::driver_version();
  const int version = driver.version();
  probe.cuda = fmt::format("{}.{}", version / 1000, version % 1000 / 10);
  if (const int error = driver.init(); error != 0) {
    probe.reason = fmt::format("cuInit failed with error {}", error);
    return probe;
  }
  const int count = driver.count();
  if (count == 0) probe.reason = "no CUDA device";
  for (int number = 0; number < count; ++number) {
    std::optional<Gpu> gpu = driver.gpu(number, count);
    if (!gpu) {
      gpu.emplace();
      gpu->name = "not accessible";
    }
    probe.gpus.push_back(*std::move(gpu));
  }
  return probe;
}

std::string text_of(const Gpu& gpu) {
  if (gpu.sms == 0) return gpu.name;
  const std::string peers = gpu.peers.empty() ? "no other GPU's memory"
                                              : fmt::format("the memory of {}", fmt::join(gpu.peers, ", "));
  return fmt::format("{}, compute capability {}, {} SMs, {:.1f} GiB, addresses {}", gpu.name,
                     gpu.compute_capability, gpu.sms, gpu.memory_gib, peers);
}

}  // namespace flashoverlap::cli

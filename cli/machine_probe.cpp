#include "machine_probe.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <thread>

#include "cuda/nvshmem_library.h"
#include "cuda/runtime_library.h"
#include "flashoverlap/mpi.h"
#include "loaded_library.h"

namespace flashoverlap::cli {
namespace {

std::optional<std::string> find_in_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::string rest = path == nullptr ? "" : path;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find(':'), rest.size());
    const std::string candidate = rest.substr(0, end) + "/" + program;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
    rest.erase(0, end + 1);
  }
  return std::nullopt;
}

int usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name") && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  }
#if defined(__x86_64__)
  return "x86-64";
#elif defined(__aarch64__)
  return "aarch64";
#else
  return "unknown";
#endif
}

std::vector<std::string> vector_features() {
  std::vector<std::string> features;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) features.emplace_back("AVX2");
  if (__builtin_cpu_supports("fma")) features.emplace_back("FMA");
  if (__builtin_cpu_supports("avx512f")) features.emplace_back("AVX-512F");
  if (__builtin_cpu_supports("avx512bf16")) features.emplace_back("AVX-512 BF16");
#elif defined(__aarch64__)
  features.emplace_back("NEON");
#endif
  return features;
}

double memory_gib() {
  const double bytes =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGE_SIZE));
  constexpr double kGib = 1024.0 * 1024 * 1024;
  return bytes / kGib;
}

Finding probe_blas() {
  // The library links OpenBLAS, so it is in this process already.
  using GetText = char*();
  Finding finding{.name = "BLAS", .found = true, .usable = true, .detail = {}, .reason = {}};
  auto* config = reinterpret_cast<GetText*>(::dlsym(RTLD_DEFAULT, "openblas_get_config"));
  auto* core = reinterpret_cast<GetText*>(::dlsym(RTLD_DEFAULT, "openblas_get_corename"));
  finding.detail = config == nullptr ? "linked; version not known" : config();
  while (finding.detail.ends_with(' ')) finding.detail.pop_back();
  if (core != nullptr) finding.detail += fmt::format(", kernels for {}", core());
  return finding;
}

Finding probe_mpi() {
  Finding finding{.name = "MPI", .found = false, .usable = false, .detail = mpi_library_name(), .reason = {}};
  const auto launcher = find_in_path("mpirun");
  finding.usable = !finding.detail.empty();
  finding.found = finding.usable || launcher.has_value();
  if (launcher) finding.detail += (finding.usable ? ", " : "") + *launcher;
  if (!finding.usable) {
    finding.reason =
        "the library was built without MPI; on Debian: apt-get install libopenmpi-dev, and build again";
  }
  return finding;
}

/// What can be said of CUDA and its devices, or why there is none.
Finding probe_cuda(const GpuProbe& gpus) {
  Finding finding{
      .name = "CUDA", .found = gpus.has_driver, .usable = false, .detail = {}, .reason = gpus.reason};
  if (gpus.has_driver) {
    finding.detail =
        fmt::format("driver {}for CUDA {}", gpus.driver.empty() ? "" : gpus.driver + " ", gpus.cuda);
    if (!gpus.gpus.empty())
      finding.detail = fmt::format("{} x {}, {}", gpus.gpus.size(), gpus.gpus.front().name, finding.detail);
  }
  if (const auto nvcc = find_in_path("nvcc"))
    finding.detail += (finding.detail.empty() ? "compiler " : ", compiler ") + *nvcc;
  if (gpus.gpus.empty()) return finding;
#ifdef FLASHOVERLAP_CUDA
  finding.usable = true;
#else
  finding.reason = "this build has no GPU executor; configure with -DFLASHOVERLAP_CUDA=ON";
#endif
  return finding;
}

/// NCCL's version code: 22304 is 2.23.4; before 2.9 it was 2804 for 2.8.4.
std::string nccl_version_text(int code) {
  constexpr int kFirstWideCode = 10000;
  return code >= kFirstWideCode ? fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100)
                                : fmt::format("{}.{}.{}", code / 1000, code / 100 % 10, code % 100);
}

/// A library that an environment variable may name.
struct NamedLibrary {
  const char* what;
  const char* variable;
  const char* usual;

  [[nodiscard]] std::string name() const { return cuda::chosen_library(variable, usual); }
  [[nodiscard]] std::string why_not_found() const {
    if (name() == usual)
      return fmt::format("{} is not on the loader's path (LD_LIBRARY_PATH, or {})", usual, variable);
    return fmt::format("{} names {}, which cannot be loaded as {}", variable, name(), what);
  }
};

constexpr int kNcclThatSharesGpus = 23007;  // cuda::kNcclSharedGpuVersion, which CPU builds do not have.

Finding probe_nccl(bool cuda_is_usable) {
  Finding finding{.name = "NCCL", .found = false, .usable = false, .detail = {}, .reason = {}};
  const NamedLibrary named{"NCCL", "FLASHOVERLAP_NCCL_LIBRARY", "libnccl.so.2"};
  const Library library{named.name().c_str()};
  int version = 0;
  if (auto* get_version = library.function<int(int*)>("ncclGetVersion"); get_version != nullptr) {
    finding.found = get_version(&version) == 0;
  }
  if (finding.found) finding.detail = nccl_version_text(version) + ", " + library.path_of("ncclGetVersion");
  finding.usable = finding.found && cuda_is_usable;
  if (!finding.found) {
    finding.reason = named.why_not_found();
  } else if (!cuda_is_usable) {
    finding.reason = "needs a usable CUDA device, see above";
  } else if (version < kNcclThatSharesGpus) {
    finding.detail +=
        fmt::format(", one rank per GPU (several need NCCL {})", nccl_version_text(kNcclThatSharesGpus));
  }
  return finding;
}

Finding probe_nvshmem(bool cuda_is_usable) {
  Finding finding{.name = "NVSHMEM", .found = false, .usable = false, .detail = {}, .reason = {}};
  const NamedLibrary named{"NVSHMEM", "FLASHOVERLAP_NVSHMEM_LIBRARY", "libnvshmem_host.so.3"};
  const Library library{named.name().c_str()};
  int version = 0;
  constexpr const char* kGetVersion = "nvshmemx_vendor_get_version_info";
  if (auto* get_version = library.function<void(int*, int*, int*)>(kGetVersion); get_version != nullptr) {
    finding.found = true;
    int major = 0;
    int minor = 0;
    int patch = 0;
    get_version(&major, &minor, &patch);
    version = major * 10'000 + minor * 100 + patch;
    finding.detail = cuda::library_version_text(version) + ", " + library.path_of(kGetVersion);
  }
  finding.usable = finding.found && cuda_is_usable && version >= cuda::kOldestNvshmemVersion;
  if (!finding.found) {
    finding.reason = named.why_not_found();
  } else if (version < cuda::kOldestNvshmemVersion) {
    finding.reason = cuda::library_version_text(cuda::kOldestNvshmemVersion) + " or later is needed";
  } else if (!cuda_is_usable) {
    finding.reason = "needs a usable CUDA device, see above";
  }
  return finding;
}

}  // namespace

Machine probe_machine() {
  Machine machine{.cores = usable_cores(),
                  .processor = processor_name(),
                  .features = vector_features(),
                  .memory_gib = memory_gib(),
                  .findings = {},
                  .gpus = {}};
  const GpuProbe gpus = probe_gpus();
  machine.gpus = gpus.gpus;
  const Finding cuda = probe_cuda(gpus);
  machine.findings = {probe_blas(), probe_mpi(), cuda, probe_nccl(cuda.usable), probe_nvshmem(cuda.usable)};
  return machine;
}

}  // namespace flashoverlap::cli

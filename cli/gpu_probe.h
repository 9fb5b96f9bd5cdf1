#pragma once

#include <string>
#include <vector>

/// The NVIDIA GPUs of this machine, asked of the driver itself: builds without CUDA find them, too.
namespace flashoverlap::cli {

struct Gpu {
  std::string name;
  std::string compute_capability;  ///< "9.0"
  int sms = 0;
  double memory_gib = 0;
  std::vector<int> peers;  ///< Those whose memory it can address.
};

struct GpuProbe {
  bool has_driver = false;
  std::string driver;     ///< "580.159.04"; empty where it is not known.
  std::string cuda;       ///< The newest CUDA that the driver runs: "13.0".
  std::vector<Gpu> gpus;  ///< By number.
  std::string reason;     ///< Why there are none; empty when there are.
};

[[nodiscard]] GpuProbe probe_gpus();

/// "NVIDIA H200, compute capability 9.0, 132 SMs, 139.8 GiB, addresses the memory of 1, 2, 3"
[[nodiscard]] std::string text_of(const Gpu& gpu);

}  // namespace flashoverlap::cli

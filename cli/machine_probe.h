#pragma once

#include <string>
#include <vector>

#include "gpu_probe.h"

/// What this machine offers, found without needing any of it: libraries are loaded at run time, by name.
namespace flashoverlap::cli {

/// One thing that the library can use, or could if it were there.
struct Finding {
  std::string name;     ///< "MPI", …
  bool found = false;   ///< It is on this machine.
  bool usable = false;  ///< This build of the library can use it here.
  std::string detail;   ///< Version and place when found.
  std::string reason;   ///< Why it is not usable; empty when it is.
};

struct Machine {
  int cores = 0;                      ///< That this process may use.
  std::string processor;              ///< Model name, or the architecture where it is not known.
  std::vector<std::string> features;  ///< Vector instruction sets.
  double memory_gib = 0;
  std::vector<Finding> findings;  ///< BLAS, MPI, CUDA, NCCL, NVSHMEM.
  std::vector<Gpu> gpus;
};

Machine probe_machine();

}  // namespace flashoverlap::cli

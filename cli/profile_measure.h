#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flashoverlap/machine_profile.h"

/// What `flashoverlap profile` measures of this machine with ranks that are threads of this process.
namespace flashoverlap::cli {

struct ProfileOptions {
  std::int64_t ranks = 2;
  std::int64_t threads = 1;  ///< Compute threads of each rank.
  std::vector<DType> dtypes = {DType::kFloat32};
  std::int64_t repetitions = 7;  ///< Of each measurement; medians are kept.
};

/// Called with the number of steps done and in all, and what comes next.
using Progress = std::function<void(std::int64_t, std::int64_t, const std::string&)>;

/// All ranks compute and communicate at the same time, as they do in operators, because they share the
/// machine. Throws Error.
MachineProfile measure_profile(const ProfileOptions& options, const Progress& progress);

}  // namespace flashoverlap::cli

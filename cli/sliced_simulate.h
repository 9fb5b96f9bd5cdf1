#pragma once

#include <string>

#include "flashoverlap/machine_profile.h"
#include "sliced_options.h"

/// What `flashoverlap simulate` says of operators whose data travels in slices, and of layers of them.
namespace flashoverlap::cli {

/// Of the rank with the most.
struct SimulatedMethod {
  double total_us = 0;
  double alone_us = 0;  ///< Its GEMM, had nothing been waited for or sent.
  double exposed_us = 0;
  double communicating_us = 0;

  [[nodiscard]] double share_of(double communication_us) const {
    return communication_us > 0 ? exposed_us / communication_us : 0;
  }
};

struct SimulatedMethods {
  SimulatedMethod overlap, sliced, serial;
};

struct SimulatedSlices {
  SlicedProblem problem;  ///< With the machine's tile and units, and the parts and send channels taken.
  std::string parts;      ///< Where those come from.
  SimulatedMethods methods;
};

/// Throws CLI::ValidationError for an empty name, else as load_machine_profile.
[[nodiscard]] MachineProfile machine_of(const std::string& name);

/// "63.4 us, exposed communication 11.5 us (74.17 % of it)".
[[nodiscard]] std::string text_of(const SimulatedMethod& method, double communication_us);

[[nodiscard]] SimulatedSlices simulate_slices(SlicedProblem problem, const MachineProfile& machine);

}  // namespace flashoverlap::cli

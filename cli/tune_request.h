#pragma once

#include <string>

#include "flashoverlap/tuner.h"
#include "problem_options.h"

namespace flashoverlap::cli {

/// The problem as the tuner takes it. `units` of one rank; 0: the machine's. Tiles that the options give are
/// the only candidates.
TuneRequest tune_request(const ProblemOptions& problem, const MachineProfile& machine, std::int64_t units);

/// TuningKey::variant as the operators make it.
std::string tuning_variant(const ProblemOptions& problem);

}  // namespace flashoverlap::cli

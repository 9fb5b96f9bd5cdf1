#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "run_measure.h"

namespace flashoverlap::cli {

/// What the measured times say.
struct Gain {
  double bound_us = 0;  ///< max(GEMM, communication): no schedule ends earlier.
  double speedup = 0;   ///< serial / overlapped.
  double share = 0;     ///< (serial - overlapped) / (serial - bound); NaN where there is nothing to gain.
};
Gain gain_of(const Times& times);

/// The table and the picture for the terminal.
std::string run_text(const RunOptions& options, const RunResult& result);
nlohmann::ordered_json run_json(const RunOptions& options, const RunResult& result);

/// Prints one of both, and one line on stderr when the result is wrong. Returns the exit code.
int print_run(const RunOptions& options, const RunResult& result, bool json);

}  // namespace flashoverlap::cli

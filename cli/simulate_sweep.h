#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "flashoverlap/overlap_choice.h"
#include "flashoverlap/simulator.h"
#include "flashoverlap/slice_choice.h"
#include "flashoverlap/tuner.h"
#include "problem_options.h"

/// What `flashoverlap simulate` computes.
namespace flashoverlap::cli {

struct SimulateOptions {
  ProblemOptions problem;
  SimulationOptions simulation;
  std::int64_t units = 0;  ///< Of one rank; 0: the machine's.
};

/// One call, both ways.
struct SimulatedCall {
  TuneResult tuned;  ///< `best` is what was simulated: the tuner's choice, or the partition that was given.
  SimulationResult overlap;
  SimulationResult serial;
  /// With ProblemOptions::method: the baseline in slices, and where tail-free has its parts from.
  std::optional<SimulationResult> sliced = std::nullopt;
  std::optional<PartsChoice> parts = std::nullopt;
  OverlapWay way = OverlapWay::kSignal;
  std::string way_reason;  ///< With OverlapMethod::kAuto, where there was a choice.
};

/// Of the rank with the most.
double exposed_us(const SimulationResult& result);
/// Share of the communication as one collective.
double exposed_share(const SimulatedCall& call, const SimulationResult& result);

SimulatedCall simulate_call(const SimulateOptions& options, const MachineProfile& machine);
nlohmann::ordered_json simulated_json(const SimulateOptions& options, const MachineProfile& machine,
                                      const SimulatedCall& call);

/// One line of a sweep's table.
struct SweepRow {
  SimulateOptions options;
  SimulatedCall call;
};

/// `what` is "m=1,2,3" or the same for n, k, ranks, units. Throws CLI::ValidationError for anything else.
std::vector<SweepRow> sweep(const SimulateOptions& options, const MachineProfile& machine,
                            const std::string& what);
std::string sweep_text(const std::vector<SweepRow>& rows, const MachineProfile& machine);
std::string sweep_csv(const std::vector<SweepRow>& rows);
nlohmann::ordered_json sweep_json(const std::vector<SweepRow>& rows, const MachineProfile& machine);

}  // namespace flashoverlap::cli

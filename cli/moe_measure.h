#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flashoverlap/in_process.h"
#include "flashoverlap/moe_layer.h"
#include "moe_options.h"

/// A MoE layer checked, and measured serially and overlapped.
namespace flashoverlap::cli {

struct MoeRun {
  MoeProblem problem;
  std::int64_t iterations = 5;
  bool link_is_auto = true;
  LinkModel link;
  bool adapt = false;
  bool backward = false;  ///< Measured and checked after each forward.
  std::string overlap_if = "always";
  std::string machine;               ///< For "predicted": as load_machine_profile takes it.
  std::vector<std::int64_t> splits;  ///< Consumers of layers that keep their split; empty: none are measured.
  std::vector<std::string> then;     ///< With splits: the routings after the problem's.
};

/// Calls of a layer that decides itself whether to overlap, after its trials.
struct MoeChosen {
  double us = 0;
  double speedup = 0;
  Method method = Method::kOverlap;  ///< Of the last call.
  std::string choice;                ///< Why.
};

/// Forward or backward; times are medians over the calls of the slowest rank.
struct MoePass {
  double serial_us = 0;
  double overlap_us = 0;
  /// Medians over pairs of calls that follow each other, and so see the same machine.
  double speedup = 0;
  double combine_speedup = 0;  ///< Second GEMM with the return.
  double dispatch_hidden = 0;  ///< Share of the transfer's own time that does not make the phase longer.
  double combine_hidden = 0;
  double work_us = 0;  ///< Of gradients of the weights, what was computed while rows travelled.
  MoePhases serial;
  MoePhases overlap;
  MoeLayer::Parts parts;
};

struct MoeResult {
  MoePass forward;
  std::optional<MoePass> backward;
  std::optional<MoeChosen> chosen;  ///< Where the layer decides itself.
  MoeReport report;                 ///< Of rank 0.
  double backlog_us = 0;
  double consumer_idle = 0;
  double error = 0;  ///< Largest relative error of the tokens checked.
  std::int64_t checked = 0;
  double gradient_error = 0;  ///< Likewise, of gradients.
  std::int64_t gradients_checked = 0;
  bool equals_serial = true;
  bool same_bits_expected = true;
  MoeWaste waste;  ///< Of all ranks.
  MoeWaste paper;
  LinkModel link;
};

/// Makes the routings, paces the link and runs all ranks, or this process of an MPI job; then only the first
/// rank's result is filled in.
[[nodiscard]] MoeResult measure_moe(MoeRun& run);

}  // namespace flashoverlap::cli

#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moe_measure.h"

/// `flashoverlap run moe-layer --adapt --splits`: what adaptation reaches, beside layers whose split stays.
namespace flashoverlap::cli {

/// One rank's layer with a split of its own. Calls are collective.
class SplitLayer {
 public:
  virtual ~SplitLayer() = default;
  /// With the `routing`-th routing. Ends when its results are there.
  virtual MoeReport call(std::size_t routing) = 0;
  /// Microseconds of a call, the slowest rank's.
  virtual double time_us(std::size_t routing) = 0;
};

/// The adapted layer's split is MoeSplits::from; of the others that of their layer.
struct MoeSplitTimes {
  std::vector<double> static_us;  ///< Medians, in the order of MoeSplits::splits.
  double adapted_us = 0;
  /// Of the adapted layer's calls over those of the best of the others: median over calls that follow each
  /// other, made after the best was chosen, whose median is the lowest of many and so partly luck.
  double adapted_share = 0;
  MoeSetting setting;                   ///< Of the adapted layer after its calls.
  std::vector<std::string> adaptation;  ///< What it decided in each of them.
  [[nodiscard]] std::size_t best() const;
};

struct MoeSplits {
  std::vector<MoeSetting> splits;  ///< compute_units: not told.
  MoeSetting from;                 ///< What the adapted layer begins with.
  std::vector<std::string> routings;
  std::vector<MoeSplitTimes> times;  ///< By routing.
};

/// Calls of the adapted layer with a routing before it is measured.
constexpr int kSettlingCalls = 20;

/// Of all ranks, for the problem's routing and then each of `run.then`: [routing][rank].
[[nodiscard]] std::vector<std::vector<MoeRouting>> routings_in_turn(MoeRun& run);

/// Of one rank, by routing. `routings` must stay.
[[nodiscard]] std::vector<const MoeRouting*> routings_of(const std::vector<std::vector<MoeRouting>>& routings,
                                                         int rank);

/// `options` with a split that stays, or, null, adaptation.
[[nodiscard]] MoeLayerOptions with_split(MoeLayerOptions options, const MoeSetting* split);

/// With splits of `run.splits` consumers and of 1, 2, 4 and 8 bands a segment. For each routing in turn: the
/// adapted layer's calls, then all layers' in turn, `run.iterations` of each. `make` makes one rank's layer
/// with a split that stays; null: one that adapts. Collective.
[[nodiscard]] MoeSplits measure_splits(
    const MoeRun& run, const std::function<std::unique_ptr<SplitLayer>(const MoeSetting*)>& make);

/// All ranks, on the CPU.
[[nodiscard]] MoeSplits measure_moe_splits(MoeRun& run);

void print_splits(const MoeRun& run, const std::string& backend, const MoeSplits& splits, bool json);

}  // namespace flashoverlap::cli

#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// Adaptation of a MoE layer at run time, which arXiv 2607.19539 leaves to future work.
namespace flashoverlap {

/// What a layer may change between calls.
struct MoeSetting {
  std::int64_t consumers = 1;      ///< Units that put segments.
  std::int64_t compute_units = 1;  ///< Units that compute tiles.
  std::int64_t segment_bands = 1;  ///< Bands of an inner segment: the paper's x.
  bool operator==(const MoeSetting&) const = default;
};

struct MoeControllerOptions {
  std::int64_t min_consumers = 1;
  std::int64_t max_consumers = 4;
  std::int64_t consumer_step = 1;  ///< Consumers that come or go at a time, >= 1.
  std::int64_t min_segment_bands = 1;
  std::int64_t max_segment_bands = 8;
  /// Units that consumers and producer share: compute_units = total_units - consumers, at least 1. 0:
  /// consumers take no unit from the producer (copy engines, or CPU threads that mostly wait).
  std::int64_t total_units = 0;
  /// A backlog beyond this share of the second GEMM's time asks for more communication.
  double high_backlog = 0.05;
  /// Consumers that would still be idle for more than this share of the time after a step down, and leave a
  /// backlog below half of high_backlog, ask for less.
  double high_idle = 0.15;
  /// Calls in a row that must ask for the same before anything changes: hysteresis.
  std::int64_t patience = 2;
};

/// What one call told, the worst over all ranks.
struct MoeObservation {
  double producer_us = 0;    ///< Second GEMM, first tile to last.
  double backlog_us = 0;     ///< From the last tile to the end of the last transfer.
  double consumer_idle = 0;  ///< Share of producer_us that consumers waited for segments, in [0, 1].
};

/// Decides from what calls tell. Deterministic: the same observations give the same decisions, so that all
/// ranks that observe alike decide alike. One step at a time: first consumers, then the segment size.
///
///   too much backlog    more consumers; at the most consumers, smaller segments, which leave less behind
///   idle, no backlog    fewer consumers; at the fewest, larger segments, which cost fewer transfers
///
/// A step with which calls take more than 5 % longer (producer and backlog together, mean of `patience`
/// calls) than the shortest before any step under this load is taken back: so steps that each cost little
/// cannot add up. It is not tried again until the observation has been in range once, or the time before the
/// step has changed by more than 20 %, which is another load.
class MoeController {
 public:
  /// Throws Error(kBadArgument) naming the option that does not hold. `initial` is moved into the bounds.
  MoeController(const MoeControllerOptions& options, const MoeSetting& initial);

  [[nodiscard]] const MoeSetting& setting() const { return setting_; }
  void freeze(bool frozen) { frozen_ = frozen; }
  [[nodiscard]] bool frozen() const { return frozen_; }

  /// Takes one call in and returns one line: what was decided, and why. Throws Error(kBadArgument) for
  /// numbers that are not finite and >= 0.
  std::string observe(const MoeObservation& observation);

 private:
  enum class Wish { kStay, kMore, kLess };
  [[nodiscard]] Wish wish_of(const MoeObservation& observation) const;
  [[nodiscard]] bool step(Wish wish, MoeSetting& next) const;
  [[nodiscard]] std::int64_t fewer_consumers() const;
  std::string judge(double mean_us);
  void set_units();

  MoeControllerOptions options_;
  MoeSetting setting_;
  MoeSetting before_;  // the step on trial came from here
  bool on_trial_ = false;
  Wish trial_ = Wish::kStay;
  double before_us_ = 0;       // mean length of calls before the step
  double shortest_us_ = 0;     // of all such means under this load; 0: none yet
  Wish barred_ = Wish::kStay;  // a direction that did not pay
  double barred_us_ = 0;
  Wish last_wish_ = Wish::kStay;
  std::int64_t in_a_row_ = 0;
  std::vector<double> recent_us_;  // the last `patience` calls with this setting
  bool frozen_ = false;
};

}  // namespace flashoverlap

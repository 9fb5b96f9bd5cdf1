#pragma once

#include <functional>
#include <vector>

#include "flashoverlap/communicator.h"
#include "flashoverlap/moe_layer.h"

/// Calls of a MoE layer, measured: what forward and backward have in common.
namespace flashoverlap::cli {

/// The slowest rank's value of each number. Collective.
[[nodiscard]] std::vector<double> slowest(Communicator& communicator, const std::vector<double>& own);

/// Calls of one method, by the slowest rank.
class MoeSeries {
 public:
  /// Measures one call, which all ranks start together. Collective.
  void add(Communicator& communicator, const std::function<MoeReport()>& call);

  struct Call {
    double total_us = 0;
    MoePhases phases;
    /// The phases of both GEMMs without other work.
    double dispatch_us = 0;
    double combine_us = 0;
    double work_us = 0;  ///< The other work.
    double backlog_us = 0;
    double consumer_idle = 0;
  };
  [[nodiscard]] const std::vector<Call>& calls() const { return calls_; }
  [[nodiscard]] const MoeReport& last() const { return last_; }  ///< On this rank.

  [[nodiscard]] double median(const std::function<double(const Call&)>& value) const;
  [[nodiscard]] MoePhases phases() const;  ///< Medians.

 private:
  std::vector<Call> calls_;
  MoeReport last_;
};

/// The median of first / second, pair by pair.
[[nodiscard]] double median_ratio(const MoeSeries& first, const MoeSeries& second,
                                  const std::function<double(const MoeSeries::Call&)>& value);

/// The parts of calls alone, next to the overlapped call before: shares of the transfers that are hidden.
class MoeHidden {
 public:
  void add(const MoeLayer::Parts& parts, const MoeSeries::Call& overlapped);
  [[nodiscard]] double dispatch() const;
  [[nodiscard]] double combine() const;
  [[nodiscard]] MoeLayer::Parts parts() const;  ///< Medians.

 private:
  std::vector<double> dispatch_;
  std::vector<double> combine_;
  std::vector<MoeLayer::Parts> parts_;
};

/// The slowest rank's. Collective.
[[nodiscard]] MoeLayer::Parts slowest(Communicator& communicator, const MoeLayer::Parts& own);

}  // namespace flashoverlap::cli

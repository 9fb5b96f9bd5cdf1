#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/predictor.h"

/// An OverlapCost in whole picoseconds, prepared for the inner loops of the searches.
namespace flashoverlap::tune {

/// Whole picoseconds in a double: sums are exact below 2^53 (2.5 hours), and min, max and + work on vectors
/// of them, which 64-bit integers do not on x86-64's baseline.
using Ticks = double;

class TickCost {
 public:
  /// `cost` must hold (check) and outlive this.
  explicit TickCost(const OverlapCost& cost);

  [[nodiscard]] std::size_t waves() const { return ready_.size(); }
  /// When a group that ends after wave i - 1 may start its transfer.
  [[nodiscard]] Ticks ready(std::size_t i) const { return ready_[i - 1]; }
  /// row(i)[j] is the transfer time of waves j..i-1, for all j < i. Valid until the next call.
  [[nodiscard]] const Ticks* row(std::size_t i);
  [[nodiscard]] Ticks transfer(std::size_t j, std::size_t i) const;
  /// Of the one group: no overlap, and so nothing that slows the computation down.
  [[nodiscard]] Ticks single_total() const { return single_total_; }
  [[nodiscard]] Ticks restore() const { return restore_; }

 private:
  void fill_row(std::size_t i);

  const BandwidthCurve& curve_;
  std::vector<Ticks> ready_;
  std::vector<double> bytes_before_;  ///< Size waves + 1.
  Ticks single_total_ = 0;
  Ticks restore_ = 0;
  /// Waves [0, equal_) have the same bytes: by_count_reversed_[equal_ - d] is the time of d of them.
  std::size_t equal_ = 0;
  std::vector<Ticks> by_count_reversed_;
  std::vector<Ticks> row_;
};

}  // namespace flashoverlap::tune

#include "tune/tick_cost.h"

namespace flashoverlap::tune {
namespace {

constexpr double kTicksPerUs = 1e6;

/// Rounds to a whole number without a library call, so that loops over it vectorise: adding 1.5 * 2^52 leaves
/// no fraction bits. (Above 2^51 ticks, 37 minutes, it may round to an even number instead; still the same
/// for everybody.)
Ticks to_ticks(double us) {
  constexpr double kShift = 6755399441055744.0;
  const double shifted = us * kTicksPerUs + kShift;
  return shifted - kShift;
}

}  // namespace

TickCost::TickCost(const OverlapCost& cost) : curve_(cost.curve), restore_(to_ticks(cost.restore_us)) {
  for (const double finish : overlapped_finish_us(cost)) ready_.push_back(to_ticks(finish + cost.signal_us));
  bytes_before_.push_back(0);
  for (const std::int64_t bytes : cost.bytes) {
    bytes_before_.push_back(bytes_before_.back() + static_cast<double>(bytes));
  }
  const std::size_t n = waves();
  row_.resize(n);
  if (n == 0) return;
  single_total_ = to_ticks(cost.finish_us.back() + cost.signal_us) + transfer(0, n) +
                  to_ticks(cost.single_group_restore_us);
  while (equal_ < n && cost.bytes[equal_] == cost.bytes[0]) ++equal_;
  by_count_reversed_.resize(equal_ + 1);
  for (std::size_t count = 0; count <= equal_; ++count)
    by_count_reversed_[equal_ - count] = transfer(0, count);
}

Ticks TickCost::transfer(std::size_t j, std::size_t i) const {
  return to_ticks(curve_.time_us(static_cast<std::int64_t>(bytes_before_[i] - bytes_before_[j])));
}

const Ticks* TickCost::row(std::size_t i) {
  if (i <= equal_) return by_count_reversed_.data() + (equal_ - i);
  fill_row(i);
  return row_.data();
}

/// Sizes grow as j falls, so the curve's pieces are walked once instead of being searched for each size.
void TickCost::fill_row(std::size_t i) {
  const std::vector<BandwidthCurve::Piece>& pieces = curve_.pieces();
  std::size_t piece = 0;
  for (std::size_t j = i; j-- > 0;) {
    const double bytes = bytes_before_[i] - bytes_before_[j];
    while (piece + 1 < pieces.size() && pieces[piece + 1].first_bytes <= bytes) ++piece;
    row_[j] = bytes == 0 ? 0 : to_ticks(pieces[piece].time_us(bytes));
  }
}

}  // namespace flashoverlap::tune

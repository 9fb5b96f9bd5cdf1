#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashoverlap {

/// How long one transfer of some size took: one sample of a bandwidth curve.
struct CurvePoint {
  double bytes = 0;      ///< Size of the whole buffer, >= 1. Always bytes, never elements.
  double time_us = 0;    ///< Median duration, > 0.
  double spread_us = 0;  ///< Half the distance between the quartiles of the repetitions; 0: not known.
  bool operator==(const CurvePoint&) const = default;
};

/// Duration of one communication call as a function of its size (arXiv 2504.19519, section 4: the bandwidth
/// curve).
///
/// The paper interpolates bandwidth. We keep *time*, because latency + bytes / bandwidth is a straight line
/// in it: linear interpolation is then exact for an ideal link, and no interpolated rate can be zero or
/// negative.
///
/// Repairs, applied in this order to whatever samples come in:
///   1. samples are sorted by size;
///   2. samples of the same size are joined to their mean time and largest spread;
///   3. a larger transfer that seems to take less time than a smaller one is measurement noise: neighbours
///   are averaged until
///      time does not fall with size (isotonic regression, pool adjacent violators).
///
/// Outside the samples the curve goes on as latency + bytes / bandwidth: below the first sample on the line
/// through the first two (its latency limited to [0, first time]); above the last sample on the line through
/// the last sample and the nearest one of at most half its size that is at least 1 % faster. Without such a
/// sample the latency there is 0, so one sample means a constant bandwidth.
///
/// Immutable; the same samples in any order make the same curve, bit for bit.
class BandwidthCurve {
 public:
  /// `name` says in error messages which curve it is, for example "all-reduce of 4 ranks".
  /// Throws Error(kBadArgument), naming sample, field and value, when there is no sample, when bytes is not
  /// in [1, 2^53], time not in (0, 1e12] us, spread not in [0, 1e12] us, or any of them not a number.
  BandwidthCurve(std::vector<CurvePoint> samples, std::string name);

  /// From (bytes, GB/s) pairs. Throws like the constructor; bandwidths must be in (0, 1e9].
  struct Rate {
    double bytes = 0;
    double gbps = 0;
  };
  [[nodiscard]] static BandwidthCurve from_rates(const std::vector<Rate>& rates, std::string name);

  /// The ideal link. Throws Error(kBadArgument) unless latency is finite and >= 0 and the bandwidth in (0,
  /// 1e9].
  [[nodiscard]] static BandwidthCurve from_link(double latency_us, double bandwidth_gbps, std::string name);

  /// Duration of a transfer of `bytes`; 0 for 0 bytes (nothing is launched). Finite, and > 0 for every size
  /// >= 1. Throws Error(kBadArgument) for a negative size.
  [[nodiscard]] double time_us(std::int64_t bytes) const;

  /// bytes / time, in 1e9 bytes a second; 0 for 0 bytes.
  [[nodiscard]] double bandwidth_gbps(std::int64_t bytes) const;

  /// The samples after repair, strictly ascending in size, non-decreasing in time.
  [[nodiscard]] const std::vector<CurvePoint>& points() const { return points_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  /// How many samples were joined or averaged away by repairs 2 and 3.
  [[nodiscard]] std::int64_t num_repaired() const { return num_repaired_; }

  /// The same curve with every time multiplied by `factor` > 0.
  [[nodiscard]] BandwidthCurve scaled(double factor) const;

  /// The straight pieces of which the curve consists, ascending: for sizes in [first_bytes, next piece's
  /// first_bytes). For code that walks sizes in order (the partition search).
  struct Piece {
    double first_bytes = 0;
    double first_time_us = 0;  ///< Time at first_bytes.
    double slope_us = 0;       ///< Per byte, >= 0.
    [[nodiscard]] double time_us(double bytes) const {
      return first_time_us + slope_us * (bytes - first_bytes);
    }
  };
  [[nodiscard]] const std::vector<Piece>& pieces() const { return pieces_; }

  bool operator==(const BandwidthCurve& other) const { return points_ == other.points_; }

 private:
  void make_pieces();

  std::vector<CurvePoint> points_;
  std::vector<Piece> pieces_;
  std::string name_;
  std::int64_t num_repaired_ = 0;
};

}  // namespace flashoverlap

#include "flashoverlap/bandwidth_curve.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/fail.h"
#include "flashoverlap/error.h"

namespace flashoverlap {
namespace {

constexpr double kMaxBytes = 9007199254740992.0;  // 2^53: beyond it doubles no longer hold every integer
constexpr double kMaxTimeUs = 1e12;
constexpr double kMaxGbps = 1e9;
constexpr double kBytesPerUsAtOneGbps = 1e3;

void check_sample(const CurvePoint& sample, std::size_t index, const std::string& name) {
  if (!(sample.bytes >= 1 && sample.bytes <= kMaxBytes)) {
    core::fail(ErrorKind::kBadArgument, "bandwidth curve '{}', sample {}: bytes is {}, must be in [1, 2^53]",
               name, index, sample.bytes);
  }
  if (!(sample.time_us > 0 && sample.time_us <= kMaxTimeUs)) {
    core::fail(ErrorKind::kBadArgument,
               "bandwidth curve '{}', sample {} ({} bytes): time is {} us, must be in (0, 1e12]", name, index,
               sample.bytes, sample.time_us);
  }
  if (!(sample.spread_us >= 0 && sample.spread_us <= kMaxTimeUs)) {
    core::fail(ErrorKind::kBadArgument,
               "bandwidth curve '{}', sample {} ({} bytes): spread is {} us, must be in [0, 1e12]", name,
               index, sample.bytes, sample.spread_us);
  }
}

/// Joins samples of equal size. Sorting by time as well makes the sums independent of the order of the input.
std::vector<CurvePoint> join_equal_sizes(std::vector<CurvePoint> samples) {
  std::sort(samples.begin(), samples.end(), [](const CurvePoint& a, const CurvePoint& b) {
    return std::pair(a.bytes, a.time_us) < std::pair(b.bytes, b.time_us);
  });
  std::vector<CurvePoint> joined;
  for (std::size_t begin = 0; begin < samples.size();) {
    std::size_t end = begin;
    CurvePoint point{.bytes = samples[begin].bytes};
    for (; end < samples.size() && samples[end].bytes == point.bytes; ++end) {
      point.time_us += samples[end].time_us;
      point.spread_us = std::max(point.spread_us, samples[end].spread_us);
    }
    point.time_us /= static_cast<double>(end - begin);
    joined.push_back(point);
    begin = end;
  }
  return joined;
}

/// Pool adjacent violators. Returns how many points got another time.
std::int64_t make_monotone(std::vector<CurvePoint>& points) {
  struct Block {
    double sum = 0;
    std::size_t count = 0;
    [[nodiscard]] double mean() const { return sum / static_cast<double>(count); }
  };
  std::vector<Block> blocks;
  for (const CurvePoint& point : points) {
    blocks.push_back({point.time_us, 1});
    while (blocks.size() > 1 && blocks[blocks.size() - 2].mean() > blocks.back().mean()) {
      const Block last = blocks.back();
      blocks.pop_back();
      blocks.back().sum += last.sum;
      blocks.back().count += last.count;
    }
  }
  std::int64_t changed = 0;
  std::size_t index = 0;
  for (const Block& block : blocks) {
    for (std::size_t i = 0; i < block.count; ++i, ++index) {
      if (block.count > 1) {
        points[index].time_us = block.mean();
        ++changed;
      }
    }
  }
  return changed;
}

double slope_between(const CurvePoint& a, const CurvePoint& b) {
  return (b.time_us - a.time_us) / (b.bytes - a.bytes);
}

BandwidthCurve::Piece piece_below(const std::vector<CurvePoint>& points) {
  const CurvePoint& first = points.front();
  double latency = 0;
  if (points.size() > 1) {
    latency = std::clamp(first.time_us - slope_between(first, points[1]) * first.bytes, 0.0, first.time_us);
  }
  return {0, latency, (first.time_us - latency) / first.bytes};
}

BandwidthCurve::Piece piece_above(const std::vector<CurvePoint>& points) {
  constexpr double kFasterBy = 0.99;  // a smaller difference is noise and would make the bandwidth absurd
  const CurvePoint& last = points.back();
  for (auto point = points.rbegin() + 1; point < points.rend(); ++point) {
    if (point->bytes <= last.bytes / 2 && point->time_us <= last.time_us * kFasterBy) {
      return {last.bytes, last.time_us, slope_between(*point, last)};
    }
  }
  return {last.bytes, last.time_us, last.time_us / last.bytes};
}

}  // namespace

BandwidthCurve::BandwidthCurve(std::vector<CurvePoint> samples, std::string name) : name_(std::move(name)) {
  if (samples.empty()) {
    core::fail(ErrorKind::kBadArgument, "bandwidth curve '{}' has no samples, at least one is needed", name_);
  }
  for (std::size_t i = 0; i < samples.size(); ++i) check_sample(samples[i], i, name_);
  const auto num_samples = static_cast<std::int64_t>(samples.size());
  points_ = join_equal_sizes(std::move(samples));
  num_repaired_ = num_samples - static_cast<std::int64_t>(points_.size()) + make_monotone(points_);
  make_pieces();
}

void BandwidthCurve::make_pieces() {
  pieces_.clear();
  pieces_.push_back(piece_below(points_));
  for (std::size_t i = 0; i + 1 < points_.size(); ++i) {
    pieces_.push_back({points_[i].bytes, points_[i].time_us, slope_between(points_[i], points_[i + 1])});
  }
  pieces_.push_back(piece_above(points_));
}

BandwidthCurve BandwidthCurve::from_rates(const std::vector<Rate>& rates, std::string name) {
  std::vector<CurvePoint> samples;
  for (std::size_t i = 0; i < rates.size(); ++i) {
    if (!(rates[i].gbps > 0 && rates[i].gbps <= kMaxGbps)) {
      core::fail(ErrorKind::kBadArgument,
                 "bandwidth curve '{}', sample {} ({} bytes): bandwidth is {} GB/s, must be in (0, 1e9]",
                 name, i, rates[i].bytes, rates[i].gbps);
    }
    samples.push_back({rates[i].bytes, rates[i].bytes / (rates[i].gbps * kBytesPerUsAtOneGbps), 0});
  }
  return {std::move(samples), std::move(name)};
}

BandwidthCurve BandwidthCurve::from_link(double latency_us, double bandwidth_gbps, std::string name) {
  if (!(latency_us >= 0 && latency_us <= kMaxTimeUs)) {
    core::fail(ErrorKind::kBadArgument, "bandwidth curve '{}': latency is {} us, must be in [0, 1e12]", name,
               latency_us);
  }
  if (!(bandwidth_gbps > 0 && bandwidth_gbps <= kMaxGbps)) {
    core::fail(ErrorKind::kBadArgument, "bandwidth curve '{}': bandwidth is {} GB/s, must be in (0, 1e9]",
               name, bandwidth_gbps);
  }
  const double us_per_byte = 1 / (bandwidth_gbps * kBytesPerUsAtOneGbps);
  // Sizes far apart: both extrapolations then follow the same line to the last digits.
  constexpr double kSmall = 1024;
  constexpr double kLarge = 1024.0 * 1024 * 1024;
  // On a very slow link that would take longer than a sample may: a link paced to a GEMM of one element is
  // one.
  const double large = std::clamp(kMaxTimeUs / 2 / us_per_byte, 2 * kSmall, kLarge);
  BandwidthCurve curve(
      {{kSmall, latency_us + kSmall * us_per_byte, 0}, {large, latency_us + large * us_per_byte, 0}},
      std::move(name));
  curve.pieces_ = {{0, latency_us, us_per_byte}};
  return curve;
}

double BandwidthCurve::time_us(std::int64_t bytes) const {
  if (bytes < 0) {
    core::fail(ErrorKind::kBadArgument,
               "bandwidth curve '{}': a transfer of {} bytes was asked for, must be >= 0", name_, bytes);
  }
  if (bytes == 0) return 0;
  const auto size = static_cast<double>(bytes);
  const auto after =
      std::upper_bound(pieces_.begin(), pieces_.end(), size,
                       [](double value, const Piece& piece) { return value < piece.first_bytes; });
  return (after - 1)->time_us(size);
}

double BandwidthCurve::bandwidth_gbps(std::int64_t bytes) const {
  const double time = time_us(bytes);
  return bytes == 0 ? 0 : static_cast<double>(bytes) / (time * kBytesPerUsAtOneGbps);
}

BandwidthCurve BandwidthCurve::scaled(double factor) const {
  if (!(factor > 0 && factor <= kMaxTimeUs)) {
    core::fail(ErrorKind::kBadArgument, "bandwidth curve '{}' cannot be scaled by {}, must be in (0, 1e12]",
               name_, factor);
  }
  BandwidthCurve curve = *this;
  for (CurvePoint& point : curve.points_) {
    point.time_us *= factor;
    point.spread_us *= factor;
  }
  for (Piece& piece : curve.pieces_) {
    piece.first_time_us *= factor;
    piece.slope_us *= factor;
  }
  return curve;
}

}  // namespace flashoverlap

#include "flashoverlap/predictor.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/fail.h"
#include "flashoverlap/error.h"
#include "tune/cost_check.h"

namespace flashoverlap {
namespace {

constexpr double kMib = 1024.0 * 1024.0;
constexpr double kMaxBytes = 9007199254740992.0;

bool finite_and_not_negative(double value) {
  return value >= 0 && std::isfinite(value);
}

std::size_t size_of_wave(std::int64_t wave) {
  return static_cast<std::size_t>(wave);
}

double total_bytes(const OverlapCost& cost) {
  double total = 0;
  for (const std::int64_t bytes : cost.bytes) total += static_cast<double>(bytes);
  return total;
}

}  // namespace

Verdict check(const OverlapCost& cost) {
  if (cost.finish_us.size() != cost.bytes.size()) {
    return core::no("the cost has times of {} waves and bytes of {}, must be equally many",
                    cost.finish_us.size(), cost.bytes.size());
  }
  double last = 0;
  for (std::size_t wave = 0; wave < cost.finish_us.size(); ++wave) {
    const double finish = cost.finish_us[wave];
    if (!finite_and_not_negative(finish) || finish < last) {
      return core::no("wave {} finishes at {} us, must be finite and not before {} us", wave, finish, last);
    }
    if (cost.bytes[wave] < 0) return core::no("wave {} has {} bytes, must be >= 0", wave, cost.bytes[wave]);
    last = finish;
  }
  if (total_bytes(cost) > kMaxBytes) return core::no("all waves together have more than 2^53 bytes");
  if (!(cost.slowdown >= 1 && std::isfinite(cost.slowdown))) {
    return core::no("slowdown is {}, must be finite and >= 1", cost.slowdown);
  }
  const struct {
    const char* name;
    double value;
  } others[] = {{"signal_us", cost.signal_us},
                {"restore_us", cost.restore_us},
                {"single_group_restore_us", cost.single_group_restore_us},
                {"steal_us_per_mib", cost.steal_us_per_mib}};
  for (const auto& other : others) {
    if (!finite_and_not_negative(other.value)) {
      return core::no("{} is {}, must be finite and >= 0", other.name, other.value);
    }
  }
  return {};
}

namespace tune {

void require(const OverlapCost& cost) {
  if (const Verdict verdict = check(cost); !verdict) {
    throw Error(ErrorKind::kBadArgument, verdict.reason);
  }
}

void require_partition(std::span<const std::int64_t> partition, std::int64_t waves) {
  std::int64_t total = 0;
  for (const std::int64_t group : partition) {
    if (group < 1 || group > waves - total) {
      core::fail(ErrorKind::kBadArgument, "partition ({}) must be positive numbers that sum to {} waves",
                 fmt::join(partition, ", "), waves);
    }
    total += group;
  }
  if (total != waves) {
    core::fail(ErrorKind::kBadArgument, "partition ({}) sums to {}, must sum to {} waves",
               fmt::join(partition, ", "), total, waves);
  }
}

}  // namespace tune

std::vector<double> overlapped_finish_us(const OverlapCost& cost) {
  tune::require(cost);
  std::vector<double> finish = cost.finish_us;
  if (finish.size() < 2) return finish;
  const double first = finish.front();
  const double rest = finish.back() - first;
  const double transfer = cost.curve.time_us(static_cast<std::int64_t>(total_bytes(cost)));
  // Communication beside the computation: all the time, or only as long as it takes.
  const double busy = transfer < rest ? transfer / rest : 1;
  // Bytes that are on their way before the last wave is done: all, or as many as the time allows.
  const double hidden = rest < transfer ? rest / transfer : 1;
  const double s = 1 + (cost.slowdown - 1) * busy;
  const double stolen_us_per_byte = cost.steal_us_per_mib / kMib * hidden;
  double sent = 0;
  for (std::size_t wave = 1; wave < finish.size(); ++wave) {
    sent += static_cast<double>(cost.bytes[wave - 1]);
    finish[wave] = s == 1 ? finish[wave] : first + (finish[wave] - first) * s;
    finish[wave] += stolen_us_per_byte * sent;
  }
  return finish;
}

Prediction predict(const OverlapCost& cost, std::span<const std::int64_t> partition) {
  tune::require(cost);
  tune::require_partition(partition, cost.num_waves());
  const bool single = partition.size() <= 1;
  const std::vector<double> finish = single ? cost.finish_us : overlapped_finish_us(cost);
  Prediction prediction;
  double free_from = 0;
  std::int64_t wave = 0;
  for (const std::int64_t waves : partition) {
    GroupTimes group{.waves = waves};
    for (const std::int64_t end = wave + waves; wave < end; ++wave)
      group.bytes += cost.bytes[size_of_wave(wave)];
    group.ready_us = finish[size_of_wave(wave - 1)];
    const double transfer_us = cost.curve.time_us(group.bytes);
    group.begin_us = std::max(free_from, group.ready_us + cost.signal_us);
    group.end_us = group.begin_us + transfer_us;
    free_from = group.end_us;
    prediction.communication_us += transfer_us;
    prediction.groups.push_back(group);
  }
  prediction.compute_us = finish.empty() ? 0 : finish.back();
  prediction.total_us = free_from + (single ? cost.single_group_restore_us : cost.restore_us);
  prediction.exposed_us = prediction.total_us - prediction.compute_us;
  return prediction;
}

double lower_bound_us(const OverlapCost& cost) {
  tune::require(cost);
  if (cost.num_waves() == 0) return 0;
  const double total = total_bytes(cost);
  double us_per_byte = cost.curve.time_us(static_cast<std::int64_t>(total)) / std::max(total, 1.0);
  for (const BandwidthCurve::Piece& piece : cost.curve.pieces()) {
    us_per_byte = std::min(us_per_byte, piece.slope_us);
    if (piece.first_bytes > 0) us_per_byte = std::min(us_per_byte, piece.first_time_us / piece.first_bytes);
  }
  const double last = cost.curve.time_us(cost.bytes.back());
  return cost.signal_us +
         std::max(cost.finish_us.back() + last, cost.finish_us.front() + total * us_per_byte);
}

double predict_algorithm1_us(double gemm_duration_us, std::span<const std::int64_t> bytes_per_wave,
                             const BandwidthCurve& curve, std::span<const std::int64_t> partition) {
  const auto waves = static_cast<std::int64_t>(bytes_per_wave.size());
  if (!finite_and_not_negative(gemm_duration_us)) {
    core::fail(ErrorKind::kBadArgument, "GEMM duration is {} us, must be finite and >= 0", gemm_duration_us);
  }
  tune::require_partition(partition, waves);
  const double wave_us = waves == 0 ? 0 : gemm_duration_us / static_cast<double>(waves);
  double t_acc_p = 0;  // accumulated computation
  double t_acc_m = 0;  // accumulated communication
  double t_m = 0;      // transfer of the group before; none before the first
  auto wave = bytes_per_wave.begin();
  for (const std::int64_t group : partition) {
    t_acc_m = std::max(t_acc_p, t_acc_m) + t_m;
    t_acc_p += wave_us * static_cast<double>(group);
    t_m = curve.time_us(std::accumulate(wave, wave + group, std::int64_t{0}));
    wave += group;
  }
  return std::max(t_acc_p, t_acc_m) + t_m;
}

}  // namespace flashoverlap

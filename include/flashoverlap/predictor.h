#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flashoverlap/bandwidth_curve.h"
#include "flashoverlap/machine_profile.h"
#include "flashoverlap/plan.h"

/// How long an overlapped call takes, from a bandwidth curve and wave times, without running or simulating
/// it.
namespace flashoverlap {

/// What one call costs on a machine, wave by wave: all that the predictor and the partition search need.
struct OverlapCost {
  /// When waves 0..i are computed, without communication beside them, from the start of the call.
  /// Non-decreasing.
  std::vector<double> finish_us;
  /// What wave i adds to the transfer: bytes of the whole buffer as the curve counts them, >= 0.
  std::vector<std::int64_t> bytes;
  BandwidthCurve curve;
  double signal_us = 0;                ///< From a group's last tile to the start of its transfer.
  double restore_us = 0;               ///< After the last transfer, with two or more groups.
  double single_group_restore_us = 0;  ///< The same for one group: often 0, because nothing was packed.
  double slowdown = 1;                 ///< See `MachineProfile`.
  double steal_us_per_mib = 0;         ///< See `MachineProfile`.

  [[nodiscard]] std::int64_t num_waves() const { return static_cast<std::int64_t>(finish_us.size()); }
};

/// Says what is wrong with a cost, or nothing: both vectors of the same size, times finite, non-negative and
/// non-decreasing, bytes >= 0 and their sum <= 2^53, slowdown >= 1, the rest finite and >= 0.
Verdict check(const OverlapCost& cost);

/// The cost of a call from its plans with the *finest* partition, on `machine`. `plans` are those of all
/// ranks, or one plan that stands for all of them (all-reduce, reduce-scatter, balanced all-to-all). Wave i
/// is group i of the plans; the slowest rank and the rank with most bytes count. Throws Error(kBadArgument)
/// for a plan without a collective per group, for plans with different numbers of groups, and for what the
/// machine profile lacks.
[[nodiscard]] OverlapCost overlap_cost(std::span<const OverlapPlan> plans, const MachineProfile& machine);

/// One group of a prediction.
struct GroupTimes {
  std::int64_t waves = 0;
  std::int64_t bytes = 0;
  double ready_us = 0;  ///< Its last tile is done.
  double begin_us = 0;  ///< Its transfer starts.
  double end_us = 0;
};

struct Prediction {
  double total_us = 0;
  double compute_us = 0;        ///< The last tile is done, slowed down by the communication beside it.
  double communication_us = 0;  ///< Sum of all transfers.
  double exposed_us = 0;        ///< total - compute: communication and restore that nothing hides.
  std::vector<GroupTimes> groups;
};

/// Ours. Beyond Algorithm 1 of arXiv 2504.19519 (section 4) it has launch and signal latency, ragged waves
/// (any wave times and bytes), the pass that restores the order, and what communication takes from the
/// computation:
///   ready(i)  = finish_us[0] + (finish_us[i] - finish_us[0]) * s + stolen(i)
///   F(0) = 0, F(i) = max(F(j), ready(i - 1) + signal) + curve(bytes of waves j..i-1)   for a group of waves
///   j..i-1 total = F(T) + restore
/// s and stolen do not depend on the partition, so that the search stays exact: communication is taken to run
/// from the end of wave 0 on (nothing can be sent before), for the fraction of the time that one whole
/// transfer takes of the computing time, at most all of it. With one group nothing runs beside the
/// computation: s = 1, stolen = 0. `simulate` has no such simplification. Throws Error(kBadArgument) for a
/// bad cost, or a partition that is not positive numbers summing to the waves.
[[nodiscard]] Prediction predict(const OverlapCost& cost, std::span<const std::int64_t> partition);

/// ready(i) of `predict` with two or more groups, for all waves.
[[nodiscard]] std::vector<double> overlapped_finish_us(const OverlapCost& cost);

/// No partition of two or more groups can be predicted faster, and neither can one group when its restore is
/// free: max(compute + fastest last transfer, first wave + all bytes at the curve's best rate).
[[nodiscard]] double lower_bound_us(const OverlapCost& cost);

/// Algorithm 1 of arXiv 2504.19519, section 4, as published: equal waves of duration / T, no latencies, T
/// already counted with the communication SMs subtracted. `bytes_per_wave` has one entry per wave. (The
/// summary that we have ends with "t_acc_m += last transfer"; the paper's artifact takes max(t_acc_p,
/// t_acc_m) first, as in the loop, and so do we: a transfer cannot start before its data exists.) Throws
/// Error(kBadArgument) as `predict` does.
[[nodiscard]] double predict_algorithm1_us(double gemm_duration_us,
                                           std::span<const std::int64_t> bytes_per_wave,
                                           const BandwidthCurve& curve,
                                           std::span<const std::int64_t> partition);

}  // namespace flashoverlap

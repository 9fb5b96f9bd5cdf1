#pragma once

#include <algorithm>
#include <cmath>

#include "ops/moe_reference.h"

/// What the gradients of a MoE layer may differ from float64 because rows are rounded to 16 bits between its
/// passes.
namespace flashoverlap::test {

/// The variance of one rounding, taken for uniform over the largest error that it can make.
class Rounding {
 public:
  explicit Rounding(DType dtype)
      : relative_(dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8),
        least_(dtype == DType::kFloat16 ? 0x1p-25 : 0) {}  // half of float16's smallest number
  double operator()(double value) const {
    const double largest = std::max(relative_ * std::abs(value), least_);
    return largest * largest / 3;
  }

 private:
  double relative_;
  double least_;
};

/// Of the derivative of the activation, by that of its argument.
inline double slope_variance(Activation activation, double x, double variance) {
  constexpr double kSteepest = 0.8;  // second derivatives: 0.5 of SiLU, 0.798 of GELU
  if (activation == Activation::kNone) return 0;
  if (activation == Activation::kRelu) return x * x <= 36 * variance ? 1 : 0;  // either side of the corner
  return kSteepest * kSteepest * variance;
}

/// One slot's rows in its expert's middle, and the variances that roundings make there.
struct SlotRounding {
  ExpertTrace trace;
  Doubles plain;        ///< [I]: the gradient by the activated row, with weight 1.
  Doubles before;       ///< [U]: the gradient by the row before the activation.
  Doubles activated_v;  ///< [I], a variance as all below.
  Doubles by_out_v;     ///< [H]: of the weighted gradient row.
  Doubles before_v;     ///< [U]: of `before`.
};

inline SlotRounding round_slot(const MoeModel& m, std::int64_t expert, const double* x, const double* by_out,
                               double weight, const Rounding& rounding) {
  SlotRounding r{run_expert(m, expert, x),    Doubles(at(m.intermediate)), Doubles(at(m.middle())),
                 Doubles(at(m.intermediate)), Doubles(at(m.hidden)),       Doubles(at(m.middle()))};
  for (std::int64_t h = 0; h < m.hidden; ++h) r.by_out_v[at(h)] = rounding(weight * by_out[h]);
  for (std::int64_t i = 0; i < m.intermediate; ++i) {
    const double gate = r.trace.before[at(i)];
    const double up = m.gated ? r.trace.before[at(m.intermediate + i)] : 1;
    const double gate_variance = rounding(gate);
    const double up_variance = m.gated ? rounding(up) : 0;
    const double slope = activation_slope(m.activation, gate);
    const double value = reference_activation(m.activation, gate);
    const double by_gate = slope * slope * gate_variance;  // of `value`
    r.activated_v[at(i)] =
        by_gate * up * up + value * value * up_variance + rounding(r.trace.activated[at(i)]);
    double y_variance = 0;
    for (std::int64_t h = 0; h < m.hidden; ++h) {
      const double w = m.down.exact[at((expert * m.hidden + h) * m.intermediate + i)];
      r.plain[at(i)] += by_out[h] * w;
      y_variance += w * w * r.by_out_v[at(h)];
    }
    const double y = weight * r.plain[at(i)];
    y_variance += rounding(y);
    r.before[at(i)] = y * up * slope;
    r.before_v[at(i)] = up * up * slope * slope * y_variance + y * y * slope * slope * up_variance +
                        y * y * up * up * slope_variance(m.activation, gate, gate_variance) +
                        rounding(r.before[at(i)]);
    if (m.gated) {
      r.before[at(m.intermediate + i)] = y * value;
      r.before_v[at(m.intermediate + i)] = value * value * y_variance + y * y * by_gate + rounding(y * value);
    }
  }
  return r;
}

/// Variances of what reference_backward gives for a layer of 16-bit rows; `exact` is what it gave. Errors of
/// the two halves of a gated row, and of one row in several columns, are not independent: their variances
/// count twice.
inline void gradient_variances(const MoeModel& m, const MoeRouting& routing, const Doubles& x,
                               const Doubles& out_gradient, const Doubles& exact_input,
                               ReferenceGradients& v) {
  const Rounding rounding(m.up.dtype);
  v.input.assign(at(routing.tokens * m.hidden), 0);
  v.weights.assign(at(routing.tokens * routing.top_k), 0);
  v.up.resize(m.up.exact.size());
  v.down.resize(m.down.exact.size());
  for (std::int64_t t = 0; t < routing.tokens; ++t) {
    const double* xt = x.data() + t * m.hidden;
    const double* dt = out_gradient.data() + t * m.hidden;
    double* input = v.input.data() + t * m.hidden;
    for (std::int32_t s = 0; s < routing.top_k; ++s) {
      const std::int64_t e = routing.expert(t, s);
      if (e < 0) continue;
      const auto weight = static_cast<double>(routing.weight(t, s));
      const SlotRounding r = round_slot(m, e, xt, dt, weight, rounding);
      double& by_weight = v.weights[at(t * routing.top_k + s)];
      for (std::int64_t i = 0; i < m.intermediate; ++i)
        by_weight += r.activated_v[at(i)] * r.plain[at(i)] * r.plain[at(i)];
      for (std::int64_t h = 0; h < m.hidden; ++h) {
        by_weight += dt[h] * dt[h] * rounding(r.trace.out[at(h)]);
        for (std::int64_t i = 0; i < m.intermediate; ++i) {
          const double a = r.trace.activated[at(i)];
          v.down[at((e * m.hidden + h) * m.intermediate + i)] +=
              r.by_out_v[at(h)] * a * a + weight * weight * dt[h] * dt[h] * r.activated_v[at(i)];
        }
        double row = 0;  // of the gradients that return
        for (std::int64_t u = 0; u < m.middle(); ++u) {
          const std::size_t w = at((e * m.middle() + u) * m.hidden + h);
          input[h] += 2 * r.before_v[at(u)] * m.up.exact[w] * m.up.exact[w];
          v.up[w] += r.before_v[at(u)] * xt[h] * xt[h];
          row += r.before[at(u)] * m.up.exact[w];
        }
        input[h] += rounding(row);
      }
    }
    for (std::int64_t h = 0; h < m.hidden; ++h) input[h] += rounding(exact_input[at(t * m.hidden + h)]);
  }
}

}  // namespace flashoverlap::test

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "core/half.h"
#include "flashoverlap/moe_layer.h"
#include "support/reference.h"

/// A MoE layer in float64, token by token, by the plainest code: every expert on one rank.
namespace flashoverlap::test {

using Doubles = std::vector<double>;

inline std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Values of the element type, and the same as float64.
struct Values {
  std::vector<std::byte> bytes;
  Doubles exact;
  DType dtype = DType::kFloat32;

  Values() = default;
  Values(std::int64_t count, DType type) : bytes(at(count * size_of(type))), exact(at(count)), dtype(type) {}
  void set(std::int64_t i, float value) {
    std::byte* to = bytes.data() + i * size_of(dtype);
    core::from_float(&value, dtype, to, 1);
    core::to_float(to, dtype, &value, 1);
    exact[at(i)] = static_cast<double>(value);
  }
  [[nodiscard]] float get(std::int64_t i) const {
    float value = 0;
    core::to_float(bytes.data() + i * size_of(dtype), dtype, &value, 1);
    return value;
  }
  void poison() { std::ranges::fill(bytes, std::byte{0xFF}); }
};

inline Values random_values(std::mt19937_64& rng, std::int64_t count, DType dtype, float scale) {
  std::uniform_real_distribution<float> uniform(-scale, scale);
  Values values(count, dtype);
  for (std::int64_t i = 0; i < count; ++i) values.set(i, uniform(rng));
  return values;
}

struct MoeModel {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t experts = 0;
  bool gated = true;
  Activation activation = Activation::kSilu;
  Values up;    ///< [experts, U, hidden]
  Values down;  ///< [experts, hidden, intermediate]
  [[nodiscard]] std::int64_t middle() const { return gated ? 2 * intermediate : intermediate; }
};

inline MoeModel random_model(std::mt19937_64& rng, const MoeLayerOptions& options) {
  MoeModel model{
      options.hidden, options.intermediate, options.num_experts, options.gated, options.activation, {}, {}};
  const auto scale = [](std::int64_t k) {
    return 1.5F / std::sqrt(static_cast<float>(std::max<std::int64_t>(1, k)));
  };
  model.up = random_values(rng, options.num_experts * model.middle() * options.hidden, options.dtype,
                           scale(options.hidden));
  model.down = random_values(rng, options.num_experts * options.hidden * options.intermediate, options.dtype,
                             scale(options.intermediate));
  return model;
}

/// The rank's part of the stacks of weights.
inline MoeWeights weights_of(const MoeModel& model, const MoeLayer& layer) {
  const std::int64_t element = size_of(model.up.dtype);
  return {model.up.bytes.data() + layer.first_expert() * model.middle() * model.hidden * element,
          model.down.bytes.data() + layer.first_expert() * model.hidden * model.intermediate * element};
}

inline double activation_slope(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return 1;
    case Activation::kRelu:
      return x > 0 ? 1 : 0;
    case Activation::kGelu:
      return (1 + std::erf(x / std::sqrt(2.0))) / 2 + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    case Activation::kSilu: {
      const double s = 1 / (1 + std::exp(-x));
      return s * (1 + x * (1 - s));
    }
  }
  return 0;
}

/// One expert on one token.
struct ExpertTrace {
  Doubles before;     ///< [U]
  Doubles activated;  ///< [I]
  Doubles out;        ///< [H]
};

inline ExpertTrace run_expert(const MoeModel& m, std::int64_t expert, const double* x) {
  ExpertTrace t{Doubles(at(m.middle())), Doubles(at(m.intermediate)), Doubles(at(m.hidden))};
  for (std::int64_t u = 0; u < m.middle(); ++u) {
    for (std::int64_t h = 0; h < m.hidden; ++h) {
      t.before[at(u)] += m.up.exact[at((expert * m.middle() + u) * m.hidden + h)] * x[h];
    }
  }
  for (std::int64_t i = 0; i < m.intermediate; ++i) {
    t.activated[at(i)] = reference_activation(m.activation, t.before[at(i)]);
    if (m.gated) t.activated[at(i)] *= t.before[at(m.intermediate + i)];
  }
  for (std::int64_t h = 0; h < m.hidden; ++h) {
    for (std::int64_t i = 0; i < m.intermediate; ++i) {
      t.out[at(h)] += m.down.exact[at((expert * m.hidden + h) * m.intermediate + i)] * t.activated[at(i)];
    }
  }
  return t;
}

/// `kept` says of each (token, slot) whether it counts; empty: all do.
inline Doubles reference_forward(const MoeModel& m, const MoeRouting& routing, const Doubles& x,
                                 const std::vector<bool>& kept = {}) {
  Doubles out(at(routing.tokens * m.hidden));
  for (std::int64_t t = 0; t < routing.tokens; ++t) {
    for (std::int32_t s = 0; s < routing.top_k; ++s) {
      if (routing.expert(t, s) < 0 || (!kept.empty() && !kept[at(t * routing.top_k + s)])) continue;
      const ExpertTrace trace = run_expert(m, routing.expert(t, s), x.data() + t * m.hidden);
      for (std::int64_t h = 0; h < m.hidden; ++h) {
        out[at(t * m.hidden + h)] += static_cast<double>(routing.weight(t, s)) * trace.out[at(h)];
      }
    }
  }
  return out;
}

struct ReferenceGradients {
  Doubles input;    ///< [tokens, hidden]
  Doubles weights;  ///< [tokens, top_k]
  Doubles up;       ///< As MoeModel::up: added to, so that ranks can share them.
  Doubles down;
};

inline void reference_backward(const MoeModel& m, const MoeRouting& routing, const Doubles& x,
                               const Doubles& out_gradient, ReferenceGradients& g) {
  g.input.assign(at(routing.tokens * m.hidden), 0);
  g.weights.assign(at(routing.tokens * routing.top_k), 0);
  g.up.resize(m.up.exact.size());
  g.down.resize(m.down.exact.size());
  for (std::int64_t t = 0; t < routing.tokens; ++t) {
    for (std::int32_t s = 0; s < routing.top_k; ++s) {
      const std::int64_t e = routing.expert(t, s);
      if (e < 0) continue;
      const double* xt = x.data() + t * m.hidden;
      const double* dt = out_gradient.data() + t * m.hidden;
      const ExpertTrace trace = run_expert(m, e, xt);
      const auto weight = static_cast<double>(routing.weight(t, s));
      Doubles by_before(at(m.middle()));
      for (std::int64_t h = 0; h < m.hidden; ++h)
        g.weights[at(t * routing.top_k + s)] += dt[h] * trace.out[at(h)];
      for (std::int64_t i = 0; i < m.intermediate; ++i) {
        double by_activated = 0;
        for (std::int64_t h = 0; h < m.hidden; ++h) {
          const std::size_t w = at((e * m.hidden + h) * m.intermediate + i);
          by_activated += weight * dt[h] * m.down.exact[w];
          g.down[w] += weight * dt[h] * trace.activated[at(i)];
        }
        const double before = trace.before[at(i)];
        const double up = m.gated ? trace.before[at(m.intermediate + i)] : 1;
        by_before[at(i)] = by_activated * up * activation_slope(m.activation, before);
        if (m.gated)
          by_before[at(m.intermediate + i)] = by_activated * reference_activation(m.activation, before);
      }
      for (std::int64_t u = 0; u < m.middle(); ++u) {
        for (std::int64_t h = 0; h < m.hidden; ++h) {
          const std::size_t w = at((e * m.middle() + u) * m.hidden + h);
          g.up[w] += by_before[at(u)] * xt[h];
          g.input[at(t * m.hidden + h)] += by_before[at(u)] * m.up.exact[w];
        }
      }
    }
  }
}

/// Largest difference, relative to the largest value (1 where that is 0). NaN where something is not a
/// number.
template <typename Got>
double relative_error(const Doubles& expected, const Got& got_at) {
  double largest = 0;
  double error = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto got = static_cast<double>(got_at(static_cast<std::int64_t>(i)));
    if (std::isnan(got)) return got;
    largest = std::max(largest, std::abs(expected[i]));
    error = std::max(error, std::abs(got - expected[i]));
  }
  return largest > 0 ? error / largest : error;
}

/// What rounding may cost: the paper's 8e-3 for 16-bit types of 11 bits and more, eight times that for
/// bfloat16, which has three bits less, and float32's own.
inline double moe_tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 2e-6;
    case DType::kFloat16:
      return 8e-3;
    case DType::kBFloat16:
      return 6.4e-2;
  }
  return 0;
}

}  // namespace flashoverlap::test

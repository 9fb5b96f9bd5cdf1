#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "flashoverlap/executor.h"
#include "support/matrix.h"

/// What a call must give, in float64, by the plainest code, with a bound on how far float32 may be from it.
namespace flashoverlap::test {

/// A value and how far a right result may be from it.
struct Bounded {
  double value = 0;
  double error = 0;
};

/// Unit roundoff: half the distance from 1 to the next number.
inline double roundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0x1p-24;
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
  }
  return 0;
}

/// Half the distance between the smallest numbers of the type: what rounding may cost next to 0.
inline double tiny(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-25 : 0x1p-134;
}

/// Storing `x` as `dtype`.
inline Bounded stored(const Bounded& x, DType dtype) {
  return {x.value, x.error + roundoff(dtype) * (std::abs(x.value) + x.error) + tiny(dtype)};
}

/// Inputs of one rank.
struct RankInputs {
  Matrix a;  ///< [m, k]
  Matrix b;  ///< [n, k]
};

/// Row `row` of A_rank · B_rank^T.
struct Term {
  std::int64_t rank = 0;
  std::int64_t row = 0;
};

/// sum over `terms` at column `col`, as it is before the epilogue.
/// Bound: a sum of k products in float32, in any order, is within k u sum |a b| (Higham, section 3.1, first
/// order; the 1.01 covers the rest); it is stored in the element type, added in float32 over ranks (one more
/// u each) and stored again.
inline Bounded reference_sum(const std::vector<RankInputs>& inputs, const std::vector<Term>& terms,
                             std::int64_t col) {
  constexpr double kHigherOrder = 1.01;
  const double u = roundoff(DType::kFloat32);
  Bounded total;
  double magnitude = 0;
  DType dtype = DType::kFloat32;
  for (const Term& term : terms) {
    const RankInputs& rank = inputs[static_cast<std::size_t>(term.rank)];
    dtype = rank.a.dtype();
    const std::int64_t k = rank.a.cols();
    Bounded partial;
    for (std::int64_t p = 0; p < k; ++p) {
      const double product =
          static_cast<double>(rank.a.at(term.row, p)) * static_cast<double>(rank.b.at(col, p));
      partial.value += product;
      partial.error += std::abs(product);
    }
    partial.error *= kHigherOrder * static_cast<double>(k) * u;
    if (dtype != DType::kFloat32) partial = stored(partial, dtype);
    total.value += partial.value;
    total.error += partial.error;
    magnitude += std::abs(partial.value) + partial.error;
  }
  total.error += kHigherOrder * static_cast<double>(terms.size()) * u * magnitude;
  return dtype == DType::kFloat32 ? total : stored(total, dtype);
}

inline double reference_activation(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kGelu:
      return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
  }
  return 0;
}

/// The epilogue of one row, in float64, and the bound: each step passes on the error of the step before (the
/// activations' slopes are below 1.13) and adds a few float32 roundings of its own.
struct ReferenceRow {
  std::vector<Bounded> residual_out;
  std::vector<Bounded> out;
};

struct ReferenceEpilogue {
  const Matrix* bias = nullptr;  ///< [1, n]
  Activation activation = Activation::kNone;
  const Matrix* residual = nullptr;
  const Matrix* rms_norm_weight = nullptr;  ///< [1, n]
  double rms_norm_eps = 1e-6;
};

inline ReferenceRow reference_row(const ReferenceEpilogue& epilogue, std::int64_t row,
                                  const std::vector<Bounded>& sums, DType dtype) {
  constexpr double kSlope = 1.13;
  constexpr double kFewRoundings =
      8;  // of the activation's own arithmetic (erf and exp are within an ulp or two)
  const double u = roundoff(DType::kFloat32);
  ReferenceRow result;
  double square_sum = 0;
  double square_error = 0;
  std::vector<Bounded> h;
  for (std::size_t j = 0; j < sums.size(); ++j) {
    const auto col = static_cast<std::int64_t>(j);
    Bounded x = sums[j];
    if (epilogue.bias != nullptr) x.value += static_cast<double>(epilogue.bias->at(0, col));
    x.error += u * std::abs(x.value);
    if (epilogue.activation != Activation::kNone) {
      const double before = x.value;
      x = {reference_activation(epilogue.activation, before),
           kSlope * x.error + kFewRoundings * u * std::abs(before)};
    }
    if (epilogue.residual != nullptr) x.value += static_cast<double>(epilogue.residual->at(row, col));
    x.error += u * std::abs(x.value);
    h.push_back(x);
    result.residual_out.push_back(stored(x, dtype));
    square_sum += x.value * x.value;
    square_error += (2 * std::abs(x.value) + x.error) * x.error;
  }
  // The scale as an interval: the mean may be off by what its terms are off, and by the roundings of a sum of
  // n squares.
  const double n = std::max(1.0, static_cast<double>(sums.size()));
  const double relative = (n + kFewRoundings) * u;
  const double eps = epilogue.rms_norm_eps;
  const double mean = square_sum / n;
  const double scale = 1 / std::sqrt(mean + eps);
  const double scale_high = 1 / std::sqrt((std::max(0.0, mean - square_error / n) + eps) * (1 - relative));
  const double scale_low = 1 / std::sqrt((mean + square_error / n + eps) * (1 + relative));
  const double scale_error = std::max(scale_high - scale, scale - scale_low);
  for (std::size_t j = 0; j < h.size(); ++j) {
    Bounded out = h[j];
    if (epilogue.rms_norm_weight != nullptr) {
      const double weight =
          static_cast<double>(epilogue.rms_norm_weight->at(0, static_cast<std::int64_t>(j)));
      out.value = h[j].value * scale * weight;
      out.error = std::abs(weight) * (h[j].error * scale_high + std::abs(h[j].value) * scale_error);
      out.error += kFewRoundings * u * (std::abs(out.value) + out.error);
    }
    result.out.push_back(stored(out, dtype));
  }
  return result;
}

}  // namespace flashoverlap::test

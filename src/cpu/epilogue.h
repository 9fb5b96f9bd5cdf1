#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/executor.h"

namespace flashoverlap::cpu {

/// The row-wise part of a call: what becomes of the sum over ranks.
class RowEpilogue {
 public:
  /// Reads bias and norm weights of `cols` elements; the other matrices of `epilogue` are used in `apply`.
  RowEpilogue(const Epilogue& epilogue, DType dtype, std::int64_t cols);

  /// True when the output is the sum itself.
  [[nodiscard]] bool identity() const { return identity_; }

  /// Finishes row `row` of the output, whose sum is in `values` (overwritten); the result goes to `out`.
  void apply(std::int64_t row, float* values, void* out) const;

 private:
  void add_residual(std::int64_t row, float* values) const;
  void normalise(float* values) const;

  const Epilogue& epilogue_;
  DType dtype_;
  std::int64_t cols_;
  bool identity_;
  std::vector<float> bias_;
  std::vector<float> norm_weight_;
};

/// activation(x) in float32, as `Activation` defines it.
void activate(Activation activation, float* values, std::int64_t count);

}  // namespace flashoverlap::cpu

#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/moe_layer.h"
#include "matrices.h"
#include "moe_data.h"

/// What the backward pass of `flashoverlap run moe-layer` is given, and what must come of it.
namespace flashoverlap::cli {

/// One rank's gradients.
class MoeGradientData {
 public:
  MoeGradientData(const MoeProblem& problem, int rank, std::int64_t experts);
  [[nodiscard]] MoeGradients gradients();
  /// What is not written shows.
  void poison();
  /// Whether all gradients have the same bits.
  [[nodiscard]] bool equals(const MoeGradientData& other) const;

  Matrix by_out;  ///< By the layer's output: random.
  Matrix input;
  std::vector<float> routing_weights;
  std::vector<float> up;
  std::vector<float> down;
};

/// Largest error, relative to the largest element of the same gradient, against float64: of the gradients of
/// the input and of the routing's weights for a few tokens of this rank, and of one column of the middle of
/// its first expert, to which the tokens of all ranks add. `checked` grows by the elements. 0 where tokens
/// are dropped, which this rank cannot know.
double moe_gradient_error(const MoeProblem& problem, const std::vector<MoeRouting>& routings, int rank,
                          std::int64_t first_expert, std::int64_t experts, const MoeGradientData& data,
                          std::int64_t& checked);
/// The error that is still right: backward rounds three times more in a row than forward.
double moe_gradient_error_limit(DType dtype);

}  // namespace flashoverlap::cli

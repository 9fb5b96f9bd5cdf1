#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/dtype.h"

namespace flashoverlap {

/// The backward pass of a router whose logits are x · gate^T, behind `MoeLayer::backward` (gradient by the
/// weights) and `route_gradient` (from there to the logits). One rank's tokens: where ranks share the gate,
/// the caller sums gate_gradient over ranks. Matrices are row-major, of type `dtype` but for float32 where
/// said.
struct MoeRouterBackward {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t num_experts = 0;
  DType dtype = DType::kFloat32;
  std::vector<float> logit_gradient;  ///< [tokens, num_experts], dense.
  const void* x = nullptr;            ///< [tokens, hidden]; for gate_gradient.
  std::int64_t ldx = 0;
  const void* gate = nullptr;  ///< [num_experts, hidden]; for input_gradient.
  std::int64_t gate_ld = 0;
  float* gate_gradient = nullptr;  ///< [num_experts, hidden], dense float32, overwritten; null: not wanted.
  /// [tokens, hidden]: logit_gradient · gate is *added*, in float32 and rounded once; null: not wanted.
  void* input_gradient = nullptr;
  std::int64_t input_ld = 0;
};

/// gate_gradient = logit_gradient^T · x, input_gradient += logit_gradient · gate. Bitwise repeatable. Throws
/// Error(kBadArgument) naming what does not fit, with nothing written.
void router_backward(const MoeRouterBackward& call);

}  // namespace flashoverlap

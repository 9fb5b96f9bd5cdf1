#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "flashoverlap/dtype.h"

/// Which experts each token of a mixture-of-experts layer goes to.
namespace flashoverlap {

enum class GateFunction {
  kSoftmax,  ///< Scores of a token are exp(logit) / sum over all experts.
  kSigmoid,  ///< Scores are 1 / (1 + exp(-logit)), each for itself.
};

[[nodiscard]] std::string_view name_of(GateFunction function);  ///< "softmax", "sigmoid"

struct GateOptions {
  GateFunction function = GateFunction::kSoftmax;
  std::int32_t top_k = 1;  ///< Experts per token, in [1, num_experts].
  /// Divide the weights of a token's chosen experts by their sum (which leaves them 0 where the sum is 0).
  bool renormalise = false;
};

/// The experts and weights of one rank's tokens.
///
/// - An expert of -1 stands for none: the slot adds nothing, whatever its weight.
/// - The same expert may stand in several slots of a token: each slot counts, and each is computed.
/// - A token all of whose slots are -1 gets an output of zeros.
/// - No tokens at all is a routing like any other.
struct MoeRouting {
  std::int64_t tokens = 0;
  std::int64_t num_experts = 0;       ///< Of all ranks together.
  std::int32_t top_k = 1;             ///< Slots per token.
  std::vector<std::int32_t> experts;  ///< [tokens, top_k]: in [0, num_experts), or -1.
  std::vector<float> weights;         ///< [tokens, top_k]

  [[nodiscard]] std::int32_t expert(std::int64_t token, std::int32_t slot) const {
    return experts[static_cast<std::size_t>(token * top_k + slot)];
  }
  [[nodiscard]] float weight(std::int64_t token, std::int32_t slot) const {
    return weights[static_cast<std::size_t>(token * top_k + slot)];
  }
};

/// Throws Error(kBadArgument) naming token, slot and value when sizes do not fit, an expert is not in
/// [-1, num_experts), or the weight of a slot that has an expert is not finite.
void check_routing(const MoeRouting& routing);

/// The top_k experts of each token by score; of equal scores the lower expert comes first. Scores are
/// computed in float64 and rounded once. A logit of -infinity closes an expert to the token: it is never
/// chosen, and where fewer than top_k are open, the last slots get expert -1 and weight 0. `logits`: [tokens,
/// num_experts], leading dimension `ld`, of type `dtype`. Throws Error(kBadArgument) for a NaN or +infinite
/// logit, naming token and expert; for top_k out of range; for sizes below 0, a null pointer, or ld <
/// num_experts.
[[nodiscard]] MoeRouting route_tokens(const void* logits, std::int64_t ld, std::int64_t tokens,
                                      std::int64_t num_experts, DType dtype, const GateOptions& options);

/// Gradient of the loss by the logits, [tokens, num_experts] dense, from the gradient by the weights that
/// `route_tokens` gave, [tokens, top_k]. The choice of experts is constant. Computed in float64.
/// Throws Error(kBadArgument) when sizes do not fit.
[[nodiscard]] std::vector<float> route_gradient(const void* logits, std::int64_t ld, DType dtype,
                                                const GateOptions& options, const MoeRouting& routing,
                                                const std::vector<float>& weight_gradient);

/// Made routings, as arXiv 2607.19539 measures with: how unevenly tokens choose experts.
enum class RoutingKind {
  kBalanced,  ///< Every expert gets the same number of slots, give or take one, all owners alike.
  kModerate,  ///< Expert e is chosen with probability proportional to 1 / sqrt(e + 1).
  kStress,    ///< Half of all slots go to the experts of one rank (the first num_experts / world_size).
};

[[nodiscard]] std::string_view name_of(RoutingKind kind);  ///< "balanced", "moderate", "stress"
/// The inverse. Throws Error(kBadArgument) that lists the names.
[[nodiscard]] RoutingKind parse_routing_kind(std::string_view name);

/// A routing of `tokens` tokens of `rank` with distinct experts in each token and weights that sum to 1. The
/// same arguments give the same routing. Throws Error(kBadArgument) for sizes out of range.
[[nodiscard]] MoeRouting make_routing(RoutingKind kind, std::int32_t rank, std::int32_t world_size,
                                      std::int64_t tokens, std::int64_t num_experts, std::int32_t top_k,
                                      std::uint64_t seed);

}  // namespace flashoverlap

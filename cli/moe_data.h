#pragma once

#include <cstdint>
#include <vector>

#include "flashoverlap/moe_layer.h"
#include "matrices.h"
#include "moe_options.h"

/// What `flashoverlap run moe-layer` multiplies, and what must come of it.
namespace flashoverlap::cli {

/// One rank's matrices, random, with the weights of experts first_expert, …
class MoeRankData {
 public:
  MoeRankData(const MoeProblem& problem, int rank, std::int64_t first_expert, std::int64_t experts);
  [[nodiscard]] MoeWeights weights() const { return {up.data(), down.data()}; }

  Matrix x;
  Matrix out;
  Matrix up;
  Matrix down;
};

/// Of one expert, as MoeWeights has them.
struct ExpertWeights {
  Matrix up;
  Matrix down;
};
ExpertWeights weights_of_expert(const MoeProblem& problem, std::int64_t expert);

/// The x of a rank.
Matrix tokens_of_rank(const MoeProblem& problem, std::int64_t rank);

/// The few tokens of a rank that are checked.
std::vector<std::int64_t> checked_tokens(std::int64_t tokens);

/// Largest error of a few tokens of this rank's `data.out`, relative to the largest element, against float64
/// with all experts. `checked` grows by the tokens.
double moe_error(const MoeProblem& problem, const MoeRouting& routing, const MoeRankData& data,
                 std::int64_t& checked);
/// The error that is still right.
double moe_error_limit(DType dtype);

}  // namespace flashoverlap::cli

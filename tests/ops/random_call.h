#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "flashoverlap/operators.h"
#include "support/matrix.h"
#include "support/reference.h"

/// Calls of any operator with random shapes, partitions, routings, types and epilogues, and what they must
/// give.
namespace flashoverlap::test {

enum class OperatorKind { kAllReduce, kScatterContiguous, kScatterBlockCyclic, kAllToAll };

/// Everything about one call, for all ranks; made by one thread, read by all ranks.
struct RandomCall {
  OperatorKind kind = OperatorKind::kAllReduce;
  int world_size = 1;
  int num_threads = 1;
  GemmOptions options;                                  ///< m apart for all-to-all
  std::vector<std::vector<std::int32_t>> destinations;  ///< All-to-all: by rank.
  std::vector<RankInputs> inputs;                       ///< By rank.
  bool with_bias = false;
  bool with_residual = false;
  bool with_residual_out = false;
  bool with_norm = false;
  Activation activation = Activation::kNone;
  std::int64_t output_padding = 0;  ///< ldo - n
  std::uint64_t epilogue_seed = 0;

  [[nodiscard]] std::int64_t rows_of(int rank) const {
    return inputs[static_cast<std::size_t>(rank)].a.rows();
  }
};

std::string to_text(const RandomCall& call);

/// Sizes up to about `largest`, edges more often than chance would have them.
RandomCall make_random_call(std::mt19937_64& rng, std::int64_t largest);

/// Collective.
std::unique_ptr<GemmOperator> make_operator(Context& context, const RandomCall& call, int rank);

/// What output row `row` of `rank` is the sum of.
std::vector<std::vector<Term>> output_terms(const RandomCall& call, const OverlapPlan& plan, int rank);

/// Runs the call overlapped (twice) and serially on this rank: same bits, guards intact, and (a sample of
/// rows) within the bound of the float64 reference.
void check_call(GemmOperator& op, const RandomCall& call, int rank);

}  // namespace flashoverlap::test

#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "flashoverlap/operators.h"
#include "support/matrix.h"
#include "support/reference.h"

/// Calls of the operators whose data travels in slices, with random shapes, slices, types and epilogues, and
/// what they must give.
namespace flashoverlap::test {

enum class SlicedKind { kAllGather, kShardedWeight, kReduceScatter, kGradient, kHeads, kFromHeads };

/// Everything about one call, for all ranks; made by one thread, read by all ranks.
struct SlicedCall {
  SlicedKind kind = SlicedKind::kAllGather;
  int world_size = 1;
  int num_threads = 1;
  GemmOptions options;
  SliceOptions slices;
  HeadSlices heads;                ///< kHeads and kFromHeads only.
  std::vector<RankInputs> inputs;  ///< By rank: what each multiplies once all has arrived.
  bool with_bias = false;
  Activation activation = Activation::kNone;
  std::int64_t output_padding = 0;  ///< ldo - columns
  std::uint64_t epilogue_seed = 0;
};

std::string to_text(const SlicedCall& call);

/// Sizes up to about `largest`; slices of any sizes, some empty.
SlicedCall make_sliced_call(std::mt19937_64& rng, std::int64_t largest);

/// Collective. With a sliced baseline, but where it gathers a matrix in another order.
std::unique_ptr<GemmOperator> make_operator(Context& context, const SlicedCall& call);

/// Runs the call overlapped (twice), serially and sliced on this rank: same bits, guards intact, gathered
/// matrices complete, and (a sample of rows) within the bound of the float64 reference.
void check_call(GemmOperator& op, const SlicedCall& call, int rank);

}  // namespace flashoverlap::test

#pragma once

#include <flashoverlap/operators.h>

#include <cstdint>
#include <memory>

#include "place.h"

/// Layers that are made of the library's operators: what the programs in examples/ and `flashoverlap run
/// mlp-tpsp|linear-dp|attention-tpsp|attention-up` have in common. Each is written once for CPUs and GPUs
/// (place.h), and checks itself against the whole layer in float64.
namespace flashoverlap::layers {

/// One rank's part of a layer, with its inputs, weights and output: made once, called often. Its place, which
/// must outlive it, says where that lies. On a GPU calls are put into the place's stream and return; the
/// layer must stay until the stream has passed them.
class Layer {
 public:
  virtual ~Layer() = default;

  /// One call; collective. With a mode other than kRun the output is undefined. kPlainGemm: all of the
  /// computation and none of the communication.
  virtual void run(Method method, Mode mode, Timeline* timeline) = 0;
  void run(Method method = Method::kOverlap) { run(method, Mode::kRun, nullptr); }

  /// What the last call gave here, all results one after the other. Waits for the place's stream.
  [[nodiscard]] virtual Values output() const = 0;
  /// Makes what is to be written unusable.
  virtual void poison() = 0;

  /// How far a sample of this rank's output of the last call, by this method, is from the whole layer in
  /// float64, as a share of the largest value there. NaN where a value is missing.
  [[nodiscard]] virtual double error(Method last) const = 0;
  [[nodiscard]] double error() const { return error(Method::kOverlap); }
  /// What it may be: in float32 one rounding for each product in the longest chain of sums, in 16-bit types
  /// one for each intermediate that is stored. Inputs count as they are, rounded.
  [[nodiscard]] virtual double largest_error() const = 0;

  /// Whether it was made with a slicing baseline: Method::kSliced. Rows (of tokens, or of a weight) are then
  /// gathered in another order, so that a rank's output is that of other tokens.
  [[nodiscard]] virtual bool has_sliced() const { return false; }

  /// Bytes that this rank sends in one call.
  [[nodiscard]] virtual double bytes_sent() const = 0;
};

/// Tensor and sequence parallelism: between layers each rank holds its share of the tokens. out = silu(tokens
/// · up^T) · down^T: tokens are gathered while the GEMM with this rank's rows of `up` runs; partial sums are
/// scattered while the GEMM with its columns of `down` runs.
struct MlpShape {
  std::int64_t tokens = 500;
  std::int64_t hidden = 96;
  std::int64_t inner = 256;  ///< Of all ranks; a multiple of their number.
};
std::unique_ptr<Layer> make_mlp_tpsp(Place& place, const MlpShape& shape, std::uint64_t seed = 1,
                                     const BaselineOptions& baseline = {});

/// Data parallelism with a weight that is spread over the ranks. Forward: y = x · weight^T, where the others'
/// rows of the weight arrive while the GEMM runs. Backward: dweight = sum over ranks of dy^T · x, of which
/// each rank keeps its rows.
struct LinearShape {
  std::int64_t samples = 120;  ///< Of each rank.
  std::int64_t in = 80;
  std::int64_t out = 150;
};
std::unique_ptr<Layer> make_linear_dp(Place& place, const LinearShape& shape, std::uint64_t seed = 1,
                                      const BaselineOptions& baseline = {});

struct AttentionShape {
  std::int64_t tokens = 150;  ///< Of all ranks.
  std::int64_t heads = 6;     ///< Of all ranks.
  std::int64_t head_size = 16;
};

/// Attention with tensor and sequence parallelism, split by queries (arXiv 2604.24013). Tokens are gathered
/// while the QKV projection of this rank's heads runs. Attention is computed for the queries of rank r + 1,
/// then r + 2, …, the own ones last; the output projection of each run of queries follows at once and is sent
/// to its owner, so that the reduce-scatter hides behind attention as well as behind the projection. (Where
/// the executor makes no rows while it runs, attention of all queries comes before the projection.)
/// Heads must be a multiple of the ranks: Error(kBadArgument).
std::unique_ptr<Layer> make_attention_tpsp(Place& place, const AttentionShape& shape, std::uint64_t seed = 1,
                                           const BaselineOptions& baseline = {});

/// Ulysses attention (arXiv 2309.14509): by tokens outside, by heads inside. The QKV projection's columns go
/// to the ranks of their heads while it runs; attention is this rank's heads', over all tokens; its output
/// goes back to the ranks of the tokens while the output projection runs. Ranks need not have equally many
/// heads.
std::unique_ptr<Layer> make_attention_up(Place& place, const AttentionShape& shape, std::uint64_t seed = 1);

/// A program with the layer: makes it on `ranks` ranks (threads of this process), calls it once, prints each
/// rank's error, and returns the exit code. With the argument --cuda ranks are on GPUs, in bf16.
int run_example(int argc, char** argv, int ranks, std::unique_ptr<Layer> (*make)(Place&));

}  // namespace flashoverlap::layers

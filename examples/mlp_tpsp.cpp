// An MLP with tensor parallelism and sequence parallelism (TPSP) on four ranks: between layers each rank
// holds a quarter of the tokens. Up: the tokens are gathered while the GEMM with this rank's columns of the
// weight runs. Down: the partial sums are scattered while the GEMM with its rows runs. No communication is
// left at either end of the GEMMs (arXiv 2604.24013). Here ranks are threads of this process; the result is
// checked against the whole MLP in float64.
#include <flashoverlap/in_process.h>
#include <flashoverlap/operators.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

namespace {

using flashoverlap::Activation;

constexpr int kRanks = 4;
constexpr std::int64_t kTokens = 500;  // No multiple of anything.
constexpr std::int64_t kHidden = 96;
constexpr std::int64_t kInner = 256;  // Of all ranks.
constexpr std::int64_t kInnerOfRank = kInner / kRanks;

std::vector<float> random_matrix(std::int64_t rows, std::int64_t cols, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> matrix(static_cast<std::size_t>(rows * cols));
  for (float& value : matrix) value = uniform(random) / std::sqrt(static_cast<float>(cols));
  return matrix;
}

flashoverlap::Operands operands(const std::vector<float>& a, const std::vector<float>& b, std::int64_t k,
                                std::vector<float>& out, std::int64_t n) {
  flashoverlap::Operands result;
  result.a = a.data();
  result.b = b.data();
  result.lda = result.ldb = k;
  result.out = out.data();
  result.ldo = n;
  return result;
}

/// The layer of one rank: made once, called often.
class MlpTpsp {
 public:
  explicit MlpTpsp(flashoverlap::Context& context)
      : up_(context, {.m = kTokens, .n = kInnerOfRank, .k = kHidden}),
        down_(context, {.m = kTokens, .n = kHidden, .k = kInnerOfRank},
              flashoverlap::OverlapMethod::kTailFree),
        inner_(static_cast<std::size_t>(kTokens * kInnerOfRank)) {}

  [[nodiscard]] std::int64_t first_token() const { return up_.first_row(); }
  [[nodiscard]] std::int64_t num_tokens() const { return up_.num_rows(); }

  /// `tokens`: [kTokens, kHidden] with this rank's in place; the others arrive. out: this rank's tokens.
  void forward(std::vector<float>& tokens, const std::vector<float>& up, const std::vector<float>& down,
               std::vector<float>& out) {
    flashoverlap::Operands first = operands(tokens, up, kHidden, inner_, kInnerOfRank);
    first.epilogue.activation = Activation::kSilu;
    up_(first);
    down_(operands(inner_, down, kInnerOfRank, out, kHidden));
  }

 private:
  flashoverlap::AllGatherGemm up_;
  flashoverlap::GemmReduceScatter down_;
  std::vector<float> inner_;
};

/// out = silu(x · up^T) · down^T for one token, with the weights of all ranks, in float64.
std::vector<double> reference(const float* token) {
  std::vector<double> out(kHidden, 0.0);
  for (unsigned rank = 0; rank < kRanks; ++rank) {
    const std::vector<float> up = random_matrix(kInnerOfRank, kHidden, 100 + rank);
    const std::vector<float> down = random_matrix(kHidden, kInnerOfRank, 200 + rank);
    for (std::int64_t i = 0; i < kInnerOfRank; ++i) {
      double sum = 0;
      for (std::int64_t p = 0; p < kHidden; ++p)
        sum += static_cast<double>(token[p]) *
               static_cast<double>(up[static_cast<std::size_t>(i * kHidden + p)]);
      const double inner = sum / (1 + std::exp(-sum));
      for (std::int64_t j = 0; j < kHidden; ++j)
        out[static_cast<std::size_t>(j)] +=
            inner * static_cast<double>(down[static_cast<std::size_t>(j * kInnerOfRank + i)]);
    }
  }
  return out;
}

}  // namespace

int main() try {
  std::vector<double> worst(kRanks, 0.0);  // By rank: each writes its own.
  flashoverlap::run_ranks(kRanks, {}, [&](const std::shared_ptr<flashoverlap::Communicator>& communicator) {
    const auto rank = static_cast<unsigned>(communicator->rank());
    flashoverlap::Context context(communicator);
    MlpTpsp layer(context);
    const std::vector<float> all = random_matrix(kTokens, kHidden, 1);
    std::vector<float> tokens(all.size(), NAN);
    const std::int64_t begin = layer.first_token() * kHidden;
    std::copy_n(all.begin() + begin, layer.num_tokens() * kHidden, tokens.begin() + begin);
    std::vector<float> out(static_cast<std::size_t>(layer.num_tokens() * kHidden), NAN);
    layer.forward(tokens, random_matrix(kInnerOfRank, kHidden, 100 + rank),
                  random_matrix(kHidden, kInnerOfRank, 200 + rank), out);
    for (std::int64_t i = 0; i < layer.num_tokens(); i += 25) {
      const std::vector<double> expected = reference(all.data() + begin + i * kHidden);
      for (std::int64_t j = 0; j < kHidden; ++j) {
        const double error = std::abs(static_cast<double>(out[static_cast<std::size_t>(i * kHidden + j)]) -
                                      expected[static_cast<std::size_t>(j)]);
        if (!(error <= worst[rank])) worst[rank] = error;
      }
    }
  });
  bool correct = true;
  for (int rank = 0; rank < kRanks; ++rank) {
    const double error = worst[static_cast<std::size_t>(rank)];
    std::printf("rank %d: largest difference from the whole MLP in float64: %.1e\n", rank, error);
    correct = correct && error < 1e-5;
  }
  return correct ? 0 : 1;
} catch (const flashoverlap::Error& error) {
  std::fprintf(stderr, "%s: %s\n", flashoverlap::name_of(error.kind()), error.what());
  return 1;
}

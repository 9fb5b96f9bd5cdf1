// A linear layer whose weight is spread over four data-parallel ranks, forward and backward. Forward: the
// other ranks' rows of the weight arrive while the GEMM runs. Backward: the weight's gradient is summed over
// the ranks and each keeps its rows, while the GEMM runs (arXiv 2604.24013). Here ranks are threads of this
// process; both results are checked against the whole layer in float64.
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

constexpr int kRanks = 4;
constexpr std::int64_t kSamples = 120;  // Of each rank.
constexpr std::int64_t kIn = 80;
constexpr std::int64_t kOut = 150;

std::vector<float> random_matrix(std::int64_t rows, std::int64_t cols, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> matrix(static_cast<std::size_t>(rows * cols));
  for (float& value : matrix) value = uniform(random);
  return matrix;
}

float at(const std::vector<float>& matrix, std::int64_t cols, std::int64_t row, std::int64_t col) {
  return matrix[static_cast<std::size_t>(row * cols + col)];
}

std::vector<float> transposed(const std::vector<float>& matrix, std::int64_t rows, std::int64_t cols) {
  std::vector<float> result;
  result.reserve(matrix.size());
  for (std::int64_t j = 0; j < cols; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) result.push_back(at(matrix, cols, i, j));
  }
  return result;
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

std::vector<float> samples_of(unsigned rank) {
  return random_matrix(kSamples, kIn, 10 + rank);
}
std::vector<float> gradients_of(unsigned rank) {
  return random_matrix(kSamples, kOut, 20 + rank);
}

/// The larger of the two; NaN when either is.
void keep_worse(double& worst, double error) {
  if (!(error <= worst)) worst = error;
}

}  // namespace

int main() try {
  std::vector<double> worst(kRanks, 0.0);  // By rank: each writes its own.
  flashoverlap::run_ranks(kRanks, {}, [&](const std::shared_ptr<flashoverlap::Communicator>& communicator) {
    const auto rank = static_cast<unsigned>(communicator->rank());
    flashoverlap::Context context(communicator);
    flashoverlap::ShardedWeightGemm forward(context, {.m = kSamples, .n = kOut, .k = kIn});
    flashoverlap::GradientReduceScatter backward(context, {.m = kOut, .n = kIn, .k = kSamples});

    // The weight, of which this rank has its rows only.
    const std::vector<float> whole = random_matrix(kOut, kIn, 1);
    std::vector<float> weight(whole.size(), NAN);
    const std::int64_t begin = forward.first_row() * kIn;
    std::copy_n(whole.begin() + begin, forward.num_rows() * kIn, weight.begin() + begin);
    const std::vector<float> x = samples_of(rank);
    std::vector<float> y(static_cast<std::size_t>(kSamples * kOut), NAN);
    forward(operands(x, weight, kIn, y, kOut));
    for (std::int64_t i = 0; i < kSamples; ++i) {
      for (std::int64_t j = 0; j < kOut; ++j) {
        double sum = 0;
        for (std::int64_t p = 0; p < kIn; ++p)
          sum += static_cast<double>(at(x, kIn, i, p)) * static_cast<double>(at(whole, kIn, j, p));
        keep_worse(worst[rank], std::abs(static_cast<double>(at(y, kOut, i, j)) - sum));
      }
    }

    const std::vector<float> dy_t = transposed(gradients_of(rank), kSamples, kOut);
    const std::vector<float> x_t = transposed(x, kSamples, kIn);
    std::vector<float> dw(static_cast<std::size_t>(backward.output_rows() * kIn), NAN);
    backward(operands(dy_t, x_t, kSamples, dw, kIn));
    for (std::int64_t i = 0; i < backward.output_rows(); ++i) {
      std::vector<double> sums(kIn, 0.0);
      for (unsigned source = 0; source < kRanks; ++source) {
        const std::vector<float> sx = samples_of(source);
        const std::vector<float> sdy = gradients_of(source);
        for (std::int64_t s = 0; s < kSamples; ++s) {
          const auto dy = static_cast<double>(at(sdy, kOut, s, forward.first_row() + i));
          for (std::int64_t j = 0; j < kIn; ++j)
            sums[static_cast<std::size_t>(j)] += dy * static_cast<double>(at(sx, kIn, s, j));
        }
      }
      for (std::int64_t j = 0; j < kIn; ++j) {
        keep_worse(worst[rank],
                   std::abs(static_cast<double>(at(dw, kIn, i, j)) - sums[static_cast<std::size_t>(j)]));
      }
    }
  });
  bool correct = true;
  for (int rank = 0; rank < kRanks; ++rank) {
    const double error = worst[static_cast<std::size_t>(rank)];
    std::printf("rank %d: largest difference from the whole layer in float64: %.1e\n", rank, error);
    correct = correct && error < 1e-3;
  }
  return correct ? 0 : 1;
} catch (const flashoverlap::Error& error) {
  std::fprintf(stderr, "%s: %s\n", flashoverlap::name_of(error.kind()), error.what());
  return 1;
}

// A row-parallel linear layer on two ranks: each has half of the columns of the input and of the weight,
// multiplies them, and gets the sum of both products. The all-reduce is hidden behind the GEMM. Here ranks
// are threads of this process.
#include <flashoverlap/in_process.h>
#include <flashoverlap/operators.h>

#include <cstdio>
#include <memory>
#include <vector>

int main() try {
  constexpr int kRanks = 2;
  flashoverlap::run_ranks(kRanks, {}, [](const std::shared_ptr<flashoverlap::Communicator>& communicator) {
    // Made once per rank: owns the compute threads. Made once per shape: owns the plan and its buffers.
    flashoverlap::Context context(communicator);
    flashoverlap::GemmOptions options;
    options.m = 512;
    options.n = 384;
    options.k = 256;
    flashoverlap::GemmAllReduce gemm_all_reduce(context, options);

    const std::vector<float> a(static_cast<std::size_t>(options.m * options.k), 1.0F);  // [m, k]
    const std::vector<float> b(static_cast<std::size_t>(options.n * options.k), 0.5F);  // [n, k]
    std::vector<float> out(static_cast<std::size_t>(options.m * options.n));            // [m, n]
    flashoverlap::Operands operands;
    operands.a = a.data();
    operands.lda = options.k;
    operands.b = b.data();
    operands.ldb = options.k;
    operands.out = out.data();
    operands.ldo = options.n;
    operands.epilogue.activation = flashoverlap::Activation::kRelu;  // Applied once, to the sum.
    gemm_all_reduce(operands);

    // 2 ranks x 256 products of 1 x 0.5.
    if (communicator->rank() == 0) std::printf("out[0, 0] = %g; expected 256\n", static_cast<double>(out[0]));
  });
  return 0;
} catch (const flashoverlap::Error& error) {
  std::fprintf(stderr, "%s: %s\n", flashoverlap::name_of(error.kind()), error.what());
  return 1;
}

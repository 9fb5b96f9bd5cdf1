// A user's program: uses every public header, and the operator whose code reaches all parts of the library.
#include <flashoverlap/communicator.h>
#include <flashoverlap/dtype.h>
#include <flashoverlap/error.h>
#include <flashoverlap/executor.h>
#include <flashoverlap/host_stream.h>
#include <flashoverlap/in_process.h>
#include <flashoverlap/operators.h>
#include <flashoverlap/plan.h>
#include <flashoverlap/plan_builders.h>
#include <flashoverlap/timeline.h>
#include <flashoverlap/version.h>

#include <cstdio>
#include <memory>
#include <vector>

int main() {
  std::vector<float> first(2);
  flashoverlap::run_ranks(2, {}, [&](const std::shared_ptr<flashoverlap::Communicator>& communicator) {
    flashoverlap::Context context(communicator);
    flashoverlap::GemmOptions options;
    options.m = options.n = options.k = 64;
    flashoverlap::GemmAllReduce gemm_all_reduce(context, options);
    const std::vector<float> ones(64 * 64, 1.0F);
    std::vector<float> out(64 * 64);
    flashoverlap::Operands operands;
    operands.a = operands.b = ones.data();
    operands.lda = operands.ldb = operands.ldo = 64;
    operands.out = out.data();
    gemm_all_reduce(operands);
    first[static_cast<std::size_t>(communicator->rank())] = out[0];
  });
  std::printf("flashoverlap %s: %g %g\n", flashoverlap::kVersion.data(), first[0], first[1]);
  return first[0] == 128.0F && first[1] == 128.0F ? 0 : 1;
}

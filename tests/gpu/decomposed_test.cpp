// GemmForm::kDecomposed against kPersistent: the same bits of values that round, for every operator.
#include <algorithm>
#include <memory>

#include "any_operator.h"
#include "gpu_matrix.h"
#include "gpu_random.h"
#include "gpu_ranks.h"
#include "gpu_test.h"

namespace flashoverlap::gpu_test {
namespace {

using Kind = OperatorKind;
constexpr Kind kKinds[] = {Kind::kAllReduce,     Kind::kSignal, Kind::kTailFree, Kind::kAllGather,
                           Kind::kShardedWeight, Kind::kHeads,  Kind::kFromHeads};

std::vector<float> random_values(Random& random, std::int64_t count) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(random.pick(-1'000'000, 1'000'000)) * 1e-6F);
  return values;
}

/// What one rank's operator gives for matrices of its own. Gathered ones are here as a whole already: what is
/// not there in time is the other tests' affair.
std::vector<float> result_of(Rank& rank, GemmForm form, Kind kind, const GemmOptions& options,
                             const SliceOptions& slices) {
  const auto op = make_any(rank.context_of(form), kind, options, slices);
  const bool gathers = kind == Kind::kAllGather || kind == Kind::kShardedWeight;
  Random random(gathers ? 1 : 1 + static_cast<std::uint64_t>(rank.rank));
  const OverlapPlan& plan = op->plan();
  const std::int64_t rows = plan.input_rows > 0 ? plan.input_rows : plan.grid.rows();
  const std::int64_t cols = plan.input_rows > 0 ? plan.input_cols : options.k;
  DeviceMatrix a(rows, cols, cols, options.dtype);
  DeviceMatrix b(options.n, options.k, options.k, options.dtype);
  const DeviceMatrix out(plan.output_rows, plan.output_cols, plan.output_cols + 8, options.dtype);
  DeviceMatrix bias(1, plan.output_cols, plan.output_cols, options.dtype);
  a.fill(random_values(random, rows * cols));
  b.fill(random_values(random, options.n * options.k));
  bias.fill(random_values(random, plan.output_cols));
  Operands operands{.a = a.data(),
                    .lda = a.ld(),
                    .b = b.data(),
                    .ldb = b.ld(),
                    .out = out.data(),
                    .ldo = out.ld(),
                    .epilogue = {.bias = bias.data(), .activation = Activation::kGelu},
                    .stream = rank.native_stream()};
  (*op)(operands);
  rank.stream->synchronize();
  return out.read();
}

}  // namespace

GPU_TEST(decomposed_has_the_same_bits) {
  const int world = world_sizes().back();
  for (const CommunicatorKind communicator : kinds_for(world)) {
    Random random(130);
    for (const Kind kind : kKinds) {
      // Few enough tiles that AllToAllGemm begins none early, see GemmForm.
      const GemmOptions options{.m = random.pick(1, kind == Kind::kFromHeads ? 300 : 900),
                                .n = 8 * random.pick(1, kind == Kind::kFromHeads ? 40 : 110),
                                .k = 64 * world,
                                .dtype = random.one_of({DType::kFloat16, DType::kBFloat16})};
      const SliceOptions slices =
          random.slices(kind == Kind::kShardedWeight || kind == Kind::kHeads ? options.n : options.m, world);
      shared_group(world, communicator).run([&](Rank& rank) {
        const std::vector<float> persistent = result_of(rank, GemmForm::kPersistent, kind, options, slices);
        const std::vector<float> decomposed = result_of(rank, GemmForm::kDecomposed, kind, options, slices);
        const auto differs = std::mismatch(persistent.begin(), persistent.end(), decomposed.begin());
        GPU_EXPECT(differs.first == persistent.end(),
                   name_of(communicator) << ", operator " << static_cast<int>(kind) << ", m " << options.m
                                         << ", n " << options.n << ", rank " << rank.rank << ": element "
                                         << differs.first - persistent.begin() << " is " << *differs.second
                                         << ", expected " << *differs.first);
      });
    }
  }
}

/// The spans of one call of an all-gather + GEMM.
Timeline spans_of(Rank& rank, GemmForm form) {
  const GemmOptions options{.m = 2048, .n = 512, .k = 128, .dtype = DType::kFloat16};
  AllGatherGemm op(rank.context_of(form), options, {.sizes = {}, .parts = 1});
  const DeviceMatrix a(options.m, options.k, options.k, options.dtype);
  const DeviceMatrix b(options.n, options.k, options.k, options.dtype);
  const DeviceMatrix out(options.m, options.n, options.n, options.dtype);
  Timeline timeline;
  op.run({.a = a.data(),
          .lda = a.ld(),
          .b = b.data(),
          .ldb = b.ld(),
          .out = out.data(),
          .ldo = out.ld(),
          .epilogue = {},
          .stream = rank.native_stream()},
         Method::kOverlap, Mode::kRun, &timeline);
  return timeline;
}

GPU_TEST(decomposed_launches_one_gemm_for_each_slice) {
  const int world = world_sizes().back();
  shared_group(world, CommunicatorKind::kLocal).run([&](Rank& rank) {
    for (const GemmForm form : kForms) {
      const Timeline timeline = spans_of(rank, form);
      const auto gemms = std::ranges::count(timeline.spans, "GEMM", &Span::track);
      GPU_EXPECT(gemms == (form == GemmForm::kPersistent ? 1 : world),
                 name_of(form) << ": " << gemms << " launches on rank " << rank.rank);
    }
  });
}

}  // namespace flashoverlap::gpu_test

// Operators whose data travels in slices: overlapped, serial and sliced have the same bits, within the bound
// of a float64 reference, for random calls.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "ops/sliced_call.h"
#include "support/ops_call.h"
#include "support/seed.h"

namespace flashoverlap::test {
namespace {

// Sanitizers slow the many small steps of these by far more than a product.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kRandomCalls = 20;
constexpr int kCallsInOneContext = 20;
#else
constexpr int kRandomCalls = 80;
constexpr int kCallsInOneContext = 60;
#endif

class SlicedCalls : public SeededTest {};

TEST_F(SlicedCalls, OverlappedEqualsSerialAndReference) {
  for (int i = 0; i < kRandomCalls; ++i) {
    const SlicedCall call = make_sliced_call(rng_, 120);
    SCOPED_TRACE(to_text(call));
    ContextOptions options;
    options.num_threads = call.num_threads;
    on_ranks(
        call.world_size,
        [&](Context& context, int rank) {
          SCOPED_TRACE(to_text(call));
          const std::unique_ptr<GemmOperator> op = make_operator(context, call);
          check_call(*op, call, rank);
        },
        options);
    if (HasFailure()) return;
  }
}

// In any order, without a barrier between the calls, while tiles and transfers are delayed at random.
TEST_F(SlicedCalls, ManyOperatorsInOneContextWithDelays) {
  const int world_size = static_cast<int>(pick(2, 4));
  std::vector<SlicedCall> calls;
  while (calls.size() < 6) {
    SlicedCall call = make_sliced_call(rng_, 50);
    if (call.world_size != world_size || call.num_threads != 2) continue;
    calls.push_back(call);
  }
  std::vector<std::size_t> order;
  for (int i = 0; i < kCallsInOneContext; ++i)
    order.push_back(static_cast<std::size_t>(pick(0, std::ssize(calls) - 1)));
  const auto delay = [](std::int64_t) {
    thread_local std::mt19937 rng(std::random_device{}());
    if (rng() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 300));
  };
  ContextOptions options;
  options.num_threads = 2;
  options.hooks = {.before_tile = delay, .before_transfer = delay};
  on_ranks(
      world_size,
      [&](Context& context, int rank) {
        std::vector<std::unique_ptr<GemmOperator>> ops;
        for (const SlicedCall& call : calls) ops.push_back(make_operator(context, call));
        for (const std::size_t index : order) {
          SCOPED_TRACE(to_text(calls[index]));
          check_call(*ops[index], calls[index], rank);
        }
      },
      options);
}

// The same call by either method and by the collective.
TEST_F(SlicedCalls, BitsDoNotDependOnTheMethod) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const GemmOptions gemm{.m = 90, .n = 70, .k = 40, .dtype = dtype, .tile_m = 16, .tile_n = 16};
    on_ranks(5,
             [&](Context& context, int rank) {
               std::mt19937_64 rng(static_cast<std::uint64_t>(rank));
               std::uniform_real_distribution<float> uniform(-1, 1);
               Matrix a(90, 40, dtype);
               Matrix b(70, 40, dtype);
               a.fill([&](auto, auto) { return uniform(rng); });
               b.fill([&](auto, auto) { return uniform(rng); });
               GemmReduceScatter plain(context, gemm);
               GemmReduceScatter signal(context, gemm, OverlapMethod::kSignal, {}, {.num_slices = 3});
               GemmReduceScatter tail_free(context, gemm, OverlapMethod::kTailFree);
               GemmReduceScatter chosen(context, gemm, OverlapMethod::kAuto);
               EXPECT_EQ(plain.method(), OverlapMethod::kSignal);
               EXPECT_EQ(chosen.method(), OverlapMethod::kTailFree);
               Matrix expected(18, 70, dtype);
               plain(operands_of(a, b, expected));
               for (GemmReduceScatter* op : {&signal, &tail_free, &chosen}) {
                 Matrix out(18, 70, dtype);
                 (*op)(operands_of(a, b, out));
                 EXPECT_TRUE(out == expected) << name_of(op->method()) << " on rank " << rank;
               }
               Matrix out(18, 70, dtype);
               signal(operands_of(a, b, out), Method::kSliced);
               EXPECT_TRUE(out == expected) << "sliced on rank " << rank;
             },
             {.num_threads = 2});
  }
}

}  // namespace
}  // namespace flashoverlap::test

// Overlapped equals serial bit for bit, and both are within the bound of a float64 reference, for random
// calls.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "ops/random_call.h"
#include "support/ops_call.h"
#include "support/seed.h"

namespace flashoverlap::test {
namespace {

// Sanitizers slow the many small steps of these by far more than a product.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kRandomCalls = 15;
constexpr int kCallsInOneContext = 20;
#else
constexpr int kRandomCalls = 60;
constexpr int kCallsInOneContext = 60;
#endif

class RandomCalls : public SeededTest {};

TEST_F(RandomCalls, OverlappedEqualsSerialAndReference) {
  for (int i = 0; i < kRandomCalls; ++i) {
    const RandomCall call = make_random_call(rng_, 200);
    SCOPED_TRACE(to_text(call));
    ContextOptions options;
    options.num_threads = call.num_threads;
    on_ranks(
        call.world_size,
        [&](Context& context, int rank) {
          SCOPED_TRACE(to_text(call));
          const std::unique_ptr<GemmOperator> op = make_operator(context, call, rank);
          check_call(*op, call, rank);
        },
        options);
    if (HasFailure()) return;
  }
}

// Operators of many shapes share one context and its workspace, in any order, without a barrier between the
// calls, while tiles and transfers are delayed at random.
TEST_F(RandomCalls, ManyOperatorsInOneContextWithDelays) {
  const int world_size = static_cast<int>(pick(2, 4));
  std::vector<RandomCall> calls;
  while (calls.size() < 6) {
    RandomCall call = make_random_call(rng_, 60);
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
        for (const RandomCall& call : calls) ops.push_back(make_operator(context, call, rank));
        for (const std::size_t index : order) {
          SCOPED_TRACE(to_text(calls[index]));
          check_call(*ops[index], calls[index], rank);
        }
      },
      options);
}

}  // namespace
}  // namespace flashoverlap::test

// Extra memory: one packed copy of the output per rank (all-to-all: and the received one) and a few tiles per
// thread.
#include <gtest/gtest.h>
#include <malloc.h>

#include <vector>

#include "support/known_faults.h"
#include "support/ops_call.h"

namespace flashoverlap::test {
namespace {

constexpr std::int64_t kM = 512;
constexpr std::int64_t kN = 384;
constexpr std::int64_t kK = 64;
constexpr std::int64_t kTile = 64;

GemmOptions options() {
  GemmOptions options;
  options.m = kM;
  options.n = kN;
  options.k = kK;
  options.tile_m = options.tile_n = kTile;
  return options;
}

/// Scratch of `threads` threads for 32-bit tiles: a tile, a row of the output, and less than a page to the
/// next page.
std::int64_t scratch_limit(int threads) {
  return threads * (4 * (kTile * kTile + kN) + 4096 + 256);
}

TEST(Memory, OnePackedCopyAndAFewTiles) {
  for (const int threads : {1, 3}) {
    ContextOptions context_options;
    context_options.num_threads = threads;
    on_ranks(
        2,
        [&](Context& context, int rank) {
          const std::int64_t output_bytes = 4 * kM * kN;
          const GemmAllReduce all_reduce(context, options());
          EXPECT_GE(context.workspace_bytes(), output_bytes);
          EXPECT_LE(context.workspace_bytes(), output_bytes + scratch_limit(threads));
          const GemmReduceScatter scatter(context, options());
          EXPECT_LE(context.workspace_bytes(), output_bytes + scratch_limit(threads))
              << "shared by all operators";
          const std::vector<std::int32_t> destinations(kM, 1 - rank);
          const GemmAllToAll exchange(context, options(), destinations);
          EXPECT_LE(context.workspace_bytes(), 2 * output_bytes + scratch_limit(threads));
        },
        context_options);
  }
}

TEST(Memory, RunsTakeNoMore) {
  on_ranks(2, [](Context& context, int rank) {
    GemmAllReduce op(context, options());
    const std::int64_t before = context.workspace_bytes();
    const Matrix a = known_matrix_a(rank, kM, kK);
    const Matrix b = known_matrix_b(rank, kN, kK);
    Matrix out(kM, kN, DType::kFloat32);
    for (const Method method : {Method::kOverlap, Method::kSerial}) op(operands_of(a, b, out), method);
    EXPECT_EQ(context.workspace_bytes(), before);
  });
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // these have allocators of their own
/// Bytes that are allocated and not freed, of all arenas. Not the resident set: an allocator keeps freed
/// pages, how many depends on which threads met in which arena.
std::int64_t allocated_bytes() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<std::int64_t>(info.uordblks + info.hblkhd);
}

TEST(Memory, CreateAndDestroyLeavesNothing) {
  const auto cycle = [] {
    on_ranks(2, [](Context& context, int rank) {
      GemmAllReduce op(context, options());
      const Matrix a = known_matrix_a(rank, kM, kK);
      const Matrix b = known_matrix_b(rank, kN, kK);
      Matrix out(kM, kN, DType::kFloat32);
      op(operands_of(a, b, out));
    });
  };
  for (int i = 0; i < 10; ++i) cycle();
  const std::int64_t before = allocated_bytes();
  for (int i = 0; i < 100; ++i) cycle();
  // One cycle holds 2 ranks x (packed 768 KiB + matrices 1 MiB): a leak of 1 KiB of it would show. What is
  // left is what the allocator's per-thread caches hold.
  EXPECT_LT(allocated_bytes() - before, 100 * 1024);
}
#endif

}  // namespace
}  // namespace flashoverlap::test

// Tail-free GEMM + reduce-scatter (tiles that add at their end what other ranks have sent) and GEMM +
// all-to-all along heads on the GPU, compared with exact integers.
#include <algorithm>
#include <numeric>

#include "flashoverlap/plan_builders.h"
#include "gpu_case.h"
#include "gpu_random.h"
#include "gpu_test.h"
#include "lateness.h"

namespace flashoverlap::gpu_test {
namespace {

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

struct TailFreeCase {
  bool to_heads = false;
  std::int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::kFloat16;
  SliceOptions rows;            ///< Reduce-scatter: the slices. Heads: whose tokens.
  SliceOptions columns;         ///< Heads: whose columns.
  std::int64_t num_slices = 0;  ///< Of the sliced baseline; 0: without.
  std::int64_t seed = 0;
  std::int64_t padding = 0;  ///< Elements between the rows of every matrix.
  bool with_epilogue = false;
  GemmForm form = GemmForm::kPersistent;

  [[nodiscard]] std::int64_t row_begin(int rank, int world) const {
    return slice_begins(rows, m, world)[index(rank)];
  }
  [[nodiscard]] std::int64_t col_begin(int rank, int world) const {
    return slice_begins(columns, n, world)[index(rank)];
  }
  [[nodiscard]] std::int64_t rows_of_a(int rank, int world) const {
    return to_heads ? row_begin(rank + 1, world) - row_begin(rank, world) : m;
  }
  [[nodiscard]] std::int64_t output_rows(int rank, int world) const {
    return to_heads ? m : row_begin(rank + 1, world) - row_begin(rank, world);
  }
  [[nodiscard]] std::int64_t output_cols(int rank, int world) const {
    return to_heads ? col_begin(rank + 1, world) - col_begin(rank, world) : n;
  }
  [[nodiscard]] std::string text() const {
    std::ostringstream text;
    text << name_of(form) << (to_heads ? " to heads" : " tail-free reduce-scatter") << " m=" << m
         << " n=" << n << " k=" << k << " " << flashoverlap::name_of(dtype) << ", "
         << (to_heads ? columns : rows).parts << " parts, " << num_slices << " slices, seed " << seed
         << ", padding " << padding << (with_epilogue ? ", epilogue" : "") << ", rows";
    for (const std::int64_t size : rows.sizes) text << " " << size;
    text << ", columns";
    for (const std::int64_t size : columns.sizes) text << " " << size;
    return text.str();
  }
};

/// One rank's operator with its matrices. Rank r's A and B have seed + r.
class TailFreeCall {
 public:
  TailFreeCall(Rank& rank, const TailFreeCase& call)
      : rank_(rank),
        call_(call),
        op_(make(rank, call)),
        a_(call.rows_of_a(rank.rank, rank.world_size), call.k, call.k + call.padding, call.dtype),
        b_(call.n, call.k, call.k + call.padding, call.dtype),
        out_(call.output_rows(rank.rank, rank.world_size), call.output_cols(rank.rank, rank.world_size),
             call.output_cols(rank.rank, rank.world_size) + call.padding, call.dtype),
        residual_(out_.rows(), out_.cols(), out_.cols() + call.padding, call.dtype),
        bias_(1, out_.cols(), out_.cols(), call.dtype) {
    Integers bias;
    for (std::int64_t j = 0; j < out_.cols(); ++j) bias.push_back(static_cast<std::int16_t>(bias_value(j)));
    bias_.fill(bias);
    residual_.fill(known_b(call.seed, out_.rows(), out_.cols()));
  }

  /// Three methods in turn, each on fresh data; the overlapped one twice.
  void run_and_check_all() {
    run_and_check(Method::kOverlap, call_.seed);
    run_and_check(Method::kSerial, call_.seed + 10);
    if (call_.num_slices > 0) run_and_check(Method::kSliced, call_.seed + 20);
    run_and_check(Method::kOverlap, call_.seed + 30);
  }

  /// `calls` in a row with the same data.
  void run_and_check(Method method, std::int64_t seed, int calls = 1) {
    fill(seed);
    for (int i = 0; i < calls; ++i) enqueue(method);
    rank_.stream->synchronize();
    check(method, seed);
  }

  void fill(std::int64_t seed) {
    a_.fill(known_a(seed + rank_.rank, a_.rows(), call_.k));
    b_.fill(known_b(seed + rank_.rank, call_.n, call_.k));
    out_.poison();
  }

  void enqueue(Method method) {
    Operands operands{.a = a_.data(),
                      .lda = a_.ld(),
                      .b = b_.data(),
                      .ldb = b_.ld(),
                      .out = out_.data(),
                      .ldo = out_.ld(),
                      .epilogue = {},
                      .stream = rank_.native_stream()};
    if (call_.with_epilogue) {
      operands.epilogue.bias = bias_.data();
      operands.epilogue.activation = Activation::kRelu;
      operands.epilogue.residual = residual_.data();
      operands.epilogue.residual_ld = residual_.ld();
    }
    op_->run(operands, method, Mode::kRun, nullptr);
  }

  void check(Method method, std::int64_t seed) const {
    const std::vector<std::int32_t> expected =
        call_.to_heads ? gathered_rows(method, seed) : summed_rows(seed);
    const Integers residual = known_b(call_.seed, out_.rows(), out_.cols());
    const std::vector<float> got = out_.read();
    GPU_EXPECT(got.size() == expected.size(), "the output has " << got.size() << " elements");
    for (std::size_t i = 0; i < got.size(); ++i) {
      const std::int64_t row = static_cast<std::int64_t>(i) / out_.cols();
      const std::int64_t col = static_cast<std::int64_t>(i) % out_.cols();
      const std::int32_t value =
          call_.with_epilogue ? std::max(expected[i] + bias_value(col), 0) + residual[i] : expected[i];
      GPU_EXPECT(got[i] == static_cast<float>(value), call_.text() << ", method " << static_cast<int>(method)
                                                                   << ", rank " << rank_.rank << ": out["
                                                                   << row << ", " << col << "] is " << got[i]
                                                                   << ", expected " << value);
    }
  }

 private:
  static std::unique_ptr<GemmOperator> make(Rank& rank, const TailFreeCase& call) {
    const GemmOptions gemm{.m = call.m, .n = call.n, .k = call.k, .dtype = call.dtype, .partition = {}};
    const BaselineOptions baseline{call.num_slices};
    if (call.to_heads) {
      return std::make_unique<GemmAllToAll>(rank.context_of(call.form), gemm,
                                            HeadSlices{call.rows, call.columns}, baseline);
    }
    return std::make_unique<GemmReduceScatter>(rank.context_of(call.form), gemm, OverlapMethod::kTailFree,
                                               call.rows, baseline);
  }

  /// bf16 and fp16 hold these exactly, in every order of summation.
  [[nodiscard]] std::int32_t exact(std::int32_t value) const {
    GPU_EXPECT(std::abs(value) <= (call_.dtype == DType::kFloat16 ? 2048 : 256),
               "the test's own data is not exact: " << value << " in " << call_.text());
    return value;
  }

  [[nodiscard]] std::vector<std::int32_t> product_of(int rank, std::int64_t seed) const {
    const std::int64_t m = call_.rows_of_a(rank, rank_.world_size);
    return multiply(known_a(seed + rank, m, call_.k), known_b(seed + rank, call_.n, call_.k), m, call_.n,
                    call_.k);
  }

  [[nodiscard]] std::vector<std::int32_t> summed_rows(std::int64_t seed) const {
    const std::int64_t begin = call_.row_begin(rank_.rank, rank_.world_size) * call_.n;
    std::vector<std::int32_t> sums(index(out_.rows() * call_.n), 0);
    for (int rank = 0; rank < rank_.world_size; ++rank) {
      const std::vector<std::int32_t> product = product_of(rank, seed);
      for (std::size_t i = 0; i < sums.size(); ++i)
        sums[i] = exact(sums[i] + exact(product[index(begin) + i]));
    }
    return sums;
  }

  [[nodiscard]] std::vector<std::int32_t> gathered_rows(Method method, std::int64_t seed) const {
    std::vector<std::int32_t> whole;  // [m, n]: the rows of all ranks
    for (int rank = 0; rank < rank_.world_size; ++rank) {
      for (const std::int32_t value : product_of(rank, seed)) whole.push_back(exact(value));
    }
    std::vector<std::int64_t> order(index(call_.m));
    std::iota(order.begin(), order.end(), 0);
    if (method == Method::kSliced) {
      order = sliced_rows(call_.rows, call_.m, rank_.world_size, op_->plan(Method::kSliced).grid.tile_m(),
                          call_.num_slices);
    }
    const std::int64_t begin = call_.col_begin(rank_.rank, rank_.world_size);
    std::vector<std::int32_t> own;
    for (const std::int64_t row : order) {
      const auto first = whole.begin() + row * call_.n + begin;
      own.insert(own.end(), first, first + out_.cols());
    }
    return own;
  }

  Rank& rank_;
  TailFreeCase call_;
  std::unique_ptr<GemmOperator> op_;
  DeviceMatrix a_, b_, out_, residual_, bias_;
};

// Sums of 4 ranks: k up to 160 in fp16, up to 16 in bf16.
TailFreeCase random_case(Random& random, int world_size, bool to_heads) {
  TailFreeCase call;
  call.to_heads = to_heads;
  call.m = random.pick(1, 900);
  call.n = random.pick(0, 1) == 0 ? random.pick(1, 110) * 8 : random.pick(1, 900);
  call.k = random.pick(0, 3) == 0 ? random.pick(1, 160) : random.pick(1, 20) * 8;
  if (random.pick(0, 2) == 0) {
    call.dtype = DType::kBFloat16;
    call.k = random.pick(1, 2) * 8;
  }
  call.rows = random.slices(call.m, world_size);
  if (to_heads) call.columns = random.slices(call.n, world_size);
  call.num_slices = random.pick(0, 3);
  call.seed = random.pick(0, 1000);
  call.padding = 8 * random.pick(0, 2);
  call.with_epilogue = random.pick(0, 1) == 1;
  return call;
}

void random_cases(bool to_heads, std::uint64_t salt, GemmForm form = GemmForm::kPersistent) {
  for (const int world : world_sizes()) {
    for (const CommunicatorKind kind : kinds_for(world)) {
      Random random(salt + static_cast<std::uint64_t>(world));
      for (int i = 0; i < cases(8); ++i) {
        TailFreeCase call = random_case(random, world, to_heads);
        call.form = form;
        shared_group(world, kind).run([&](Rank& rank) { TailFreeCall(rank, call).run_and_check_all(); });
      }
    }
  }
}

}  // namespace

GPU_TEST(tail_free_reduce_scatter_random) {
  random_cases(false, 70);
}

GPU_TEST(tail_free_heads_random) {
  random_cases(true, 80);
}

GPU_TEST(tail_free_decomposed_random) {
  random_cases(false, 75, GemmForm::kDecomposed);
  random_cases(true, 85, GemmForm::kDecomposed);
}

GPU_TEST(tail_free_announced_by_stream_memory) {
  for (const CommunicatorKind kind : kinds_for(world_sizes().front())) {
    GroupOptions options = few_sms(kind);
    options.wait = GroupWait::kStreamMemory;
    Group group(options);
    Random random(90);
    for (int i = 0; i < cases(4); ++i) {
      const TailFreeCase call = random_case(random, options.world_size, false);
      group.run([&](Rank& rank) { TailFreeCall(rank, call).run_and_check_all(); });
    }
  }
}

// Calls in a row without a look at the result between them, one rank late by turns: what arrived in one call
// is never added in the next (fault B07).
GPU_TEST(tail_free_calls_in_a_row_with_late_ranks) {
  for (const CommunicatorKind kind : kinds_for(world_sizes().front())) {
    Group group(few_sms(kind));
    TailFreeCase call;
    call.m = 512;
    call.n = 256;
    call.k = 128;
    for (const GemmForm form : kForms) {
      call.form = form;
      group.run([&](Rank& rank) {
        TailFreeCall own(rank, call);
        run_with_late_ranks(rank, own);
      });
    }
  }
}

// The product over no columns: nothing is computed, and the sum of nothing is zero.
GPU_TEST(tail_free_without_depth) {
  for (int i = 0; i < cases(4); ++i) {
    TailFreeCase call;
    call.to_heads = i % 2 == 1;
    call.form = kForms[i / 2];
    call.m = 300;
    call.n = 200;
    call.k = 0;
    const int world = world_sizes().front();
    shared_group(world, kinds_for(world).front()).run([&](Rank& rank) {
      TailFreeCall(rank, call).run_and_check_all();
    });
  }
}

}  // namespace flashoverlap::gpu_test

// All-to-all along heads + GEMM on the GPU (A in blocks, gates in the middle of tiles, tiles that are begun):
// compared with exact integers.
#include <algorithm>
#include <chrono>

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

struct FromHeadsCase {
  std::int64_t m = 0, n = 0, k = 0;  ///< All tokens, columns of the output, columns of all heads.
  DType dtype = DType::kFloat16;
  HeadSlices heads;
  std::int64_t num_slices = 0;  ///< Of the sliced baseline; 0: without.
  std::int64_t seed = 0;
  std::int64_t padding = 0;  ///< Elements between the rows of B and of the output.
  bool with_epilogue = false;
  GemmForm form = GemmForm::kPersistent;

  [[nodiscard]] std::string text() const {
    std::ostringstream text;
    text << name_of(form) << " all-to-all + GEMM m=" << m << " n=" << n << " k=" << k << " "
         << flashoverlap::name_of(dtype) << ", " << heads.columns.parts << " parts, " << num_slices
         << " slices, seed " << seed << ", padding " << padding << (with_epilogue ? ", epilogue" : "")
         << ", rows";
    for (const std::int64_t size : heads.rows.sizes) text << " " << size;
    text << ", columns";
    for (const std::int64_t size : heads.columns.sizes) text << " " << size;
    return text.str();
  }
};

/// One rank's operator with its matrices. All ranks' A together and B have the same seed everywhere.
class FromHeadsCall {
 public:
  FromHeadsCall(Rank& rank, const FromHeadsCase& call)
      : rank_(rank),
        call_(call),
        op_(rank.context_of(call.form),
            {.m = call.m, .n = call.n, .k = call.k, .dtype = call.dtype, .partition = {}}, call.heads,
            BaselineOptions{call.num_slices}),
        a_(call.m, op_.num_columns(), op_.num_columns(), call.dtype),
        b_(call.n, call.k, call.k + call.padding, call.dtype),
        out_(op_.output_rows(), call.n, call.n + call.padding, call.dtype),
        residual_(op_.output_rows(), call.n, call.n + call.padding, call.dtype),
        residual_out_(op_.output_rows(), call.n, call.n, call.dtype),
        bias_(1, call.n, call.n, call.dtype) {
    Integers bias;
    for (std::int64_t j = 0; j < call.n; ++j) bias.push_back(static_cast<std::int16_t>(bias_value(j)));
    bias_.fill(bias);
    residual_.fill(known_b(call.seed + 7, out_.rows(), call.n));
  }

  void run_and_check_all() {
    run_and_check(Method::kOverlap, call_.seed);
    run_and_check(Method::kSerial, call_.seed + 10);
    if (call_.num_slices > 0) run_and_check(Method::kSliced, call_.seed + 20);
    run_and_check(Method::kOverlap, call_.seed + 30);
  }

  /// `calls` in a row with the same data.
  void run_and_check(Method method, std::int64_t seed, int calls = 1) {
    fill(method, seed);
    for (int i = 0; i < calls; ++i) enqueue(method);
    rank_.stream->synchronize();
    check(method, seed);
  }

  void fill(Method method, std::int64_t seed) {
    const Integers whole = known_a(seed, call_.m, call_.k);
    const std::int64_t pieces = method == Method::kSliced ? call_.num_slices : 1;
    const std::int64_t columns = op_.num_columns();
    Integers own;
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      const std::int64_t begin = op_.first_column() + piece * columns / pieces;
      const std::int64_t end = op_.first_column() + (piece + 1) * columns / pieces;
      for (std::int64_t i = 0; i < call_.m; ++i)
        own.insert(own.end(), whole.begin() + i * call_.k + begin, whole.begin() + i * call_.k + end);
    }
    a_.fill(own);
    b_.fill(known_b(seed, call_.n, call_.k));
    out_.poison();
    residual_out_.poison();
  }

  void enqueue(Method method, Mode mode = Mode::kRun) { op_.run(operands(), method, mode, nullptr); }

  [[nodiscard]] Operands operands() const {
    Operands operands{.a = a_.data(),
                      .lda = a_.ld(),
                      .b = b_.data(),
                      .ldb = b_.ld(),
                      .out = out_.data(),
                      .ldo = out_.ld(),
                      .epilogue = {},
                      .stream = rank_.native_stream()};
    if (!call_.with_epilogue) return operands;
    operands.epilogue.bias = bias_.data();
    operands.epilogue.activation = Activation::kRelu;
    operands.epilogue.residual = residual_.data();
    operands.epilogue.residual_ld = residual_.ld();
    operands.epilogue.residual_out = residual_out_.data();
    operands.epilogue.residual_out_ld = residual_out_.ld();
    return operands;
  }

  void check(Method method, std::int64_t seed) const {
    const Integers whole = known_a(seed, call_.m, call_.k);
    const auto first = whole.begin() + op_.first_row() * call_.k;
    const Integers own(first, first + out_.rows() * call_.k);
    const std::vector<std::int32_t> product =
        multiply(own, known_b(seed, call_.n, call_.k), out_.rows(), call_.n, call_.k);
    const Integers residual = known_b(call_.seed + 7, out_.rows(), call_.n);
    const std::vector<float> got = out_.read();
    const std::vector<float> sums = residual_out_.read();
    for (std::size_t i = 0; i < got.size(); ++i) {
      std::int32_t expected = product[i];
      GPU_EXPECT(std::abs(expected) <= (call_.dtype == DType::kFloat16 ? 2000 : 250),
                 "the test's own data is not exact: " << expected << " in " << call_.text());
      if (call_.with_epilogue) {
        expected = std::max(expected + bias_value(static_cast<std::int64_t>(i) % call_.n), 0) + residual[i];
        GPU_EXPECT(sums[i] == static_cast<float>(expected), call_.text() << ": residual_out at " << i);
      }
      GPU_EXPECT(got[i] == static_cast<float>(expected),
                 call_.text() << ", method " << static_cast<int>(method) << ", rank " << rank_.rank
                              << ": out[" << static_cast<std::int64_t>(i) / call_.n << ", "
                              << static_cast<std::int64_t>(i) % call_.n << "] is " << got[i] << ", expected "
                              << expected);
    }
  }

  [[nodiscard]] AllToAllGemm& op() { return op_; }

 private:
  Rank& rank_;
  FromHeadsCase call_;
  AllToAllGemm op_;
  DeviceMatrix a_, b_, out_, residual_, residual_out_, bias_;
};

/// Sizes of ranks' columns, all multiples of 8 or of any size.
SliceOptions columns_of(Random& random, std::int64_t k, int world_size) {
  if (random.pick(0, 2) == 0) return random.slices(k, world_size);
  SliceOptions columns = random.slices(k / 8, world_size);
  if (columns.sizes.empty()) columns.sizes = std::vector<std::int64_t>(index(world_size), k / 8 / world_size);
  std::int64_t sum = 0;
  for (std::int64_t& size : columns.sizes) sum += size *= 8;
  columns.sizes.back() += k - sum;
  return columns;
}

// fp16 holds integers up to 2048 exactly: k up to 160; bf16 up to 256: k up to 16.
FromHeadsCase random_case(Random& random, int world_size, bool is_large) {
  FromHeadsCase call;
  call.m = is_large ? random.pick(1500, 2500) : random.pick(0, 900);
  call.n = is_large ? random.pick(60, 100) * 8 : random.pick(1, 900);
  call.k = random.pick(0, 3) == 0 && !is_large ? random.pick(0, 160) : random.pick(1, 20) * 8;
  if (random.pick(0, 3) == 0) {
    call.dtype = DType::kBFloat16;
    call.k = random.pick(1, 2) * 8;
  }
  call.heads.rows = is_large ? SliceOptions{} : random.slices(call.m, world_size);
  call.heads.columns = columns_of(random, call.k, world_size);
  call.num_slices = random.pick(0, 3);
  call.seed = random.pick(0, 1000);
  call.padding = 8 * random.pick(0, 2);
  call.with_epilogue = random.pick(0, 1) == 1;
  return call;
}

void random_cases(std::uint64_t salt, GemmForm form) {
  for (const int world : world_sizes()) {
    for (const CommunicatorKind kind : kinds_for(world)) {
      Random random(salt + static_cast<std::uint64_t>(world));
      for (int i = 0; i < cases(10); ++i) {
        FromHeadsCase call = random_case(random, world, i % 4 == 3);
        call.form = form;
        shared_group(world, kind).run([&](Rank& rank) { FromHeadsCall(rank, call).run_and_check_all(); });
      }
    }
  }
}

}  // namespace

GPU_TEST(all_to_all_gemm_random) {
  random_cases(110, GemmForm::kPersistent);
}

GPU_TEST(all_to_all_gemm_decomposed_random) {
  random_cases(115, GemmForm::kDecomposed);
}

GPU_TEST(all_to_all_gemm_announced_by_stream_memory) {
  for (const CommunicatorKind kind : kinds_for(world_sizes().front())) {
    GroupOptions options = few_sms(kind);
    options.wait = GroupWait::kStreamMemory;
    Group group(options);
    Random random(120);
    for (int i = 0; i < cases(4); ++i) {
      const FromHeadsCase call = random_case(random, options.world_size, i % 2 == 1);
      group.run([&](Rank& rank) { FromHeadsCall(rank, call).run_and_check_all(); });
    }
  }
}

// Calls in a row without a look at the result between them, one rank late by turns: neither arrivals nor what
// tiles have begun with are those of another call (fault B07).
GPU_TEST(all_to_all_gemm_calls_in_a_row_with_late_ranks) {
  for (const CommunicatorKind kind : kinds_for(world_sizes().front())) {
    Group group(few_sms(kind));
    FromHeadsCase call;
    call.m = 2048;
    call.n = 768;
    call.k = 128;
    for (const GemmForm form : kForms) {
      call.form = form;
      group.run([&](Rank& rank) {
        FromHeadsCall own(rank, call);
        run_with_late_ranks(rank, own);
        // The parts of a call alone leave nothing behind either.
        for (const Mode mode : {Mode::kGemmOnly, Mode::kPlainGemm, Mode::kCommunicationOnly})
          own.enqueue(Method::kOverlap, mode);
        own.run_and_check(Method::kOverlap, 100);
      });
    }
  }
}

// The GEMM has all SMs, the copy engines bring what it waits for.
GPU_TEST(all_to_all_gemm_on_all_sms) {
  GroupOptions options = few_sms(CommunicatorKind::kCopyEngine);
  if (!has_devices_for(options.world_size)) throw Skip("ranks share a GPU, and would fill it");
  options.partitions = false;
  options.compute_sms = options.communication_sms = 0;
  options.wait = GroupWait::kStreamMemory;
  Group group(options);
  FromHeadsCase call;  // more tiles than all SMs have at a time
  call.m = 8192;
  call.n = 2048;
  call.k = 128;
  call.num_slices = 2;  // whose all-to-alls copy within a device, too
  group.run([&](Rank& rank) { FromHeadsCall(rank, call).run_and_check_all(); });
}

GPU_TEST(all_to_all_gemm_refuses_what_cannot_run) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  FromHeadsCase call;
  call.m = call.n = 128;
  call.k = 64;
  shared_group(2, CommunicatorKind::kLocal).run([&](Rank& rank) {
    FromHeadsCall own(rank, call);
    const DeviceMatrix wide(128, 32, 40, DType::kFloat16);
    Operands operands = own.operands();
    operands.a = wide.data();
    operands.lda = wide.ld();
    GPU_EXPECT_ERROR(own.op()(operands), "leading dimension of a is 40", "must be dense: 32");
  });
}

}  // namespace flashoverlap::gpu_test

// All-gather + GEMM on the GPU, of A (AllGatherGemm) and of B (ShardedWeightGemm): what other ranks send is
// poison until it arrives, results are compared with exact integers.
#include <algorithm>
#include <limits>
#include <numeric>

#include "check.h"
#include "flashoverlap/plan_builders.h"
#include "gemm_choice.h"
#include "gpu_case.h"
#include "gpu_random.h"
#include "gpu_test.h"
#include "lateness.h"

namespace flashoverlap::gpu_test {
namespace {

enum class Applied { kNothing, kBias, kBiasAndRelu, kBiasAndResidual };

struct GatherCase {
  bool of_weight = false;
  std::int64_t m = 0, n = 0, k = 0;
  SliceOptions slices;
  std::int64_t num_slices = 0;  ///< Of the sliced baseline; 0: without.
  std::int64_t seed = 0;
  Applied applied = Applied::kNothing;
  GemmForm form = GemmForm::kPersistent;

  [[nodiscard]] std::int64_t gathered() const { return of_weight ? n : m; }
  [[nodiscard]] std::string text() const {
    std::ostringstream text;
    text << name_of(form) << (of_weight ? " sharded weight" : " all-gather") << " m=" << m << " n=" << n
         << " k=" << k << ", " << slices.parts << " parts, " << num_slices << " slices, seed " << seed
         << ", sizes";
    for (const std::int64_t size : slices.sizes) text << " " << size;
    return text.str();
  }
};

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// One rank's operator with its matrices. The gathered matrix has the same seed on all ranks, the other one a
/// rank's own.
class GatherCall {
 public:
  GatherCall(Rank& rank, const GatherCase& call)
      : rank_(rank),
        call_(call),
        op_(make(rank, call)),
        a_(call.m, call.k, call.k, DType::kFloat16),
        b_(call.n, call.k, call.k, DType::kFloat16),
        out_(call.m, call.n, call.n + 8, DType::kFloat16),
        bias_(1, call.n, call.n, DType::kFloat16),
        residual_(call.m, call.n, call.n + 8, DType::kFloat16) {
    Integers bias, residual;
    for (std::int64_t j = 0; j < call.n; ++j) bias.push_back(static_cast<std::int16_t>(bias_value(j)));
    for (std::int64_t i = 0; i < call.m * call.n; ++i) {
      residual.push_back(static_cast<std::int16_t>(residual_value(rank.rank, i / call.n, i % call.n)));
    }
    bias_.fill(bias);
    residual_.fill(residual);
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
    fill(method, seed);
    for (int i = 0; i < calls; ++i) enqueue(method);
    rank_.stream->synchronize();
    check(method, seed);
  }

  void fill(Method method, std::int64_t seed) {
    const Integers a = known_a(call_.of_weight ? seed + rank_.rank : seed, call_.m, call_.k);
    const Integers b = known_b(call_.of_weight ? seed : seed + rank_.rank, call_.n, call_.k);
    const Integers& whole = call_.of_weight ? b : a;
    const std::vector<std::int64_t> order = order_of(method);
    const auto begins = slice_begins(call_.slices, call_.gathered(), rank_.world_size);
    std::vector<float> here(whole.size(), std::numeric_limits<float>::quiet_NaN());
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (order[i] < begins[index(rank_.rank)] || order[i] >= begins[index(rank_.rank) + 1]) continue;
      for (std::int64_t c = 0; c < call_.k; ++c) {
        here[i * index(call_.k) + index(c)] = whole[index(order[i] * call_.k + c)];
      }
    }
    (call_.of_weight ? b_ : a_).fill(here);
    if (call_.of_weight) {
      a_.fill(a);
    } else {
      b_.fill(b);
    }
    out_.poison();
  }

  void enqueue(Method method) { op_->run(operands(), method, Mode::kRun, nullptr); }

  [[nodiscard]] Operands operands() const {
    Operands operands{.a = a_.data(),
                      .lda = a_.ld(),
                      .b = b_.data(),
                      .ldb = b_.ld(),
                      .out = out_.data(),
                      .ldo = out_.ld(),
                      .epilogue = {},
                      .stream = rank_.native_stream()};
    if (call_.applied == Applied::kNothing) return operands;
    operands.epilogue.bias = bias_.data();
    if (call_.applied == Applied::kBiasAndRelu) operands.epilogue.activation = Activation::kRelu;
    if (call_.applied == Applied::kBiasAndResidual) {
      operands.epilogue.residual = residual_.data();
      operands.epilogue.residual_ld = residual_.ld();
    }
    return operands;
  }

  void check(Method method, std::int64_t seed) const {
    const Integers a = known_a(call_.of_weight ? seed + rank_.rank : seed, call_.m, call_.k);
    const Integers b = known_b(call_.of_weight ? seed : seed + rank_.rank, call_.n, call_.k);
    const std::vector<std::int32_t> product = multiply(a, b, call_.m, call_.n, call_.k);
    const std::vector<std::int64_t> order = order_of(method);
    const std::vector<float> got = out_.read();
    for (std::int64_t i = 0; i < call_.m; ++i) {
      for (std::int64_t j = 0; j < call_.n; ++j) {
        const std::int64_t row = call_.of_weight ? i : order[index(i)];
        const std::int64_t col = call_.of_weight ? order[index(j)] : j;
        const std::int32_t expected = after_epilogue(product[index(row * call_.n + col)], i, j);
        GPU_EXPECT(got[index(i * call_.n + j)] == static_cast<float>(expected),
                   call_.text() << ", method " << static_cast<int>(method) << ", rank " << rank_.rank
                                << ": out[" << i << ", " << j << "] is " << got[index(i * call_.n + j)]
                                << ", expected " << expected);
      }
    }
    // What was gathered stays, for whoever needs it next.
    const Integers& whole = call_.of_weight ? b : a;
    const std::vector<float> gathered = (call_.of_weight ? b_ : a_).read();
    for (std::size_t i = 0; i < order.size(); ++i) {
      for (std::int64_t c = 0; c < call_.k; ++c) {
        const float value = gathered[i * index(call_.k) + index(c)];
        GPU_EXPECT(value == static_cast<float>(whole[index(order[i] * call_.k + c)]),
                   call_.text() << ", rank " << rank_.rank << ": row " << i << " was not gathered");
      }
    }
  }

  [[nodiscard]] const DeviceMatrix& out() const { return out_; }
  [[nodiscard]] GemmOperator& op() { return *op_; }

 private:
  static std::unique_ptr<GemmOperator> make(Rank& rank, const GatherCase& call) {
    const GemmOptions gemm{.m = call.m, .n = call.n, .k = call.k, .dtype = DType::kFloat16, .partition = {}};
    if (call.of_weight) {
      return std::make_unique<ShardedWeightGemm>(rank.context_of(call.form), gemm, call.slices,
                                                 BaselineOptions{call.num_slices});
    }
    return std::make_unique<AllGatherGemm>(rank.context_of(call.form), gemm, call.slices,
                                           BaselineOptions{call.num_slices});
  }

  [[nodiscard]] std::int32_t after_epilogue(std::int32_t value, std::int64_t row, std::int64_t col) const {
    switch (call_.applied) {
      case Applied::kNothing:
        return value;
      case Applied::kBias:
        return value + bias_value(col);
      case Applied::kBiasAndRelu:
        return std::max(value + bias_value(col), 0);
      default:
        return value + bias_value(col) + residual_value(rank_.rank, row, col);
    }
  }

  /// The row (of A, or of B) that lies at each place.
  [[nodiscard]] std::vector<std::int64_t> order_of(Method method) const {
    if (method == Method::kSliced) {
      const TileGrid& grid = op_->plan(Method::kSliced).grid;
      return sliced_rows(call_.slices, call_.gathered(), rank_.world_size,
                         call_.of_weight ? grid.tile_n() : grid.tile_m(), call_.num_slices);
    }
    std::vector<std::int64_t> order(index(call_.gathered()));
    std::iota(order.begin(), order.end(), 0);
    return order;
  }

  Rank& rank_;
  GatherCase call_;
  std::unique_ptr<GemmOperator> op_;
  DeviceMatrix a_, b_, out_, bias_, residual_;
};

// fp16 is exact up to 2048: k up to 160. A and B are dense, so k says how they are aligned.
GatherCase random_gather(Random& random, int world_size, bool of_weight) {
  GatherCase call;
  call.of_weight = of_weight;
  call.m = random.pick(1, 900);
  call.n = random.pick(1, 900);
  call.k = random.pick(0, 3) == 0 ? random.pick(1, 160) : random.pick(1, 20) * 8;
  call.num_slices = random.pick(0, 3);
  call.seed = random.pick(0, 1000);
  call.applied = static_cast<Applied>(random.pick(0, 3));
  call.slices = random.slices(call.gathered(), world_size);
  return call;
}

void random_gathers(bool of_weight, std::uint64_t salt, GemmForm form = GemmForm::kPersistent) {
  for (const int world : world_sizes()) {
    for (const CommunicatorKind kind : kinds_for(world)) {
      Random random(salt + static_cast<std::uint64_t>(world));
      for (int i = 0; i < cases(8); ++i) {
        GatherCase call = random_gather(random, world, of_weight);
        call.form = form;
        shared_group(world, kind).run([&](Rank& rank) { GatherCall(rank, call).run_and_check_all(); });
      }
    }
  }
}

}  // namespace

GPU_TEST(all_gather_gemm_random) {
  random_gathers(false, 20);
}

GPU_TEST(all_gather_weight_random) {
  random_gathers(true, 30);
}

GPU_TEST(all_gather_decomposed_random) {
  random_gathers(false, 25, GemmForm::kDecomposed);
  random_gathers(true, 35, GemmForm::kDecomposed);
}

// Each kernel with each epilogue, whether it applies it to its tiles or leaves it to the pass behind.
GPU_TEST(all_gather_epilogues_in_every_kernel) {
  for (const cuda::SignalGemmVariant* variant : cuda::variants_for(0, DType::kFloat16)) {
    GroupOptions options = few_sms(CommunicatorKind::kLocal);
    options.gemm_variant = variant->name;
    Group group(options);
    Random random(45);
    for (const Applied applied : {Applied::kBias, Applied::kBiasAndRelu, Applied::kBiasAndResidual}) {
      GatherCase call = random_gather(random, options.world_size, random.pick(0, 1) == 1);
      call.applied = applied;
      call.k = 8 * random.pick(1, 20);  // as all kernels take it
      group.run([&](Rank& rank) { GatherCall(rank, call).run_and_check_all(); });
    }
  }
}

GPU_TEST(all_gather_announced_by_stream_memory) {
  for (const CommunicatorKind kind : kinds_for(world_sizes().front())) {
    GroupOptions options = few_sms(kind);
    options.wait = GroupWait::kStreamMemory;
    Group group(options);
    Random random(40);
    for (int i = 0; i < cases(4); ++i) {
      const GatherCase call = random_gather(random, options.world_size, i % 2 == 1);
      group.run([&](Rank& rank) { GatherCall(rank, call).run_and_check_all(); });
    }
  }
}

GPU_TEST(all_gather_without_partitions) {
  for (const CommunicatorKind kind : kinds_for(world_sizes().front())) {
    GroupOptions options = few_sms(kind);
    // Ranks that share a GPU without partitions would fill it with GEMMs that wait for each other.
    if (options.world_size > 1 && !has_devices_for(options.world_size)) continue;
    options.partitions = false;
    options.compute_sms = 0;
    Group group(options);
    Random random(50);
    for (int i = 0; i < cases(4); ++i) {
      const GatherCase call = random_gather(random, options.world_size, i % 2 == 1);
      group.run([&](Rank& rank) { GatherCall(rank, call).run_and_check_all(); });
    }
  }
}

// The GEMM has all SMs, the copy engines bring what it waits for.
GPU_TEST(all_gather_on_all_sms) {
  GroupOptions options = few_sms(CommunicatorKind::kCopyEngine);
  if (!has_devices_for(options.world_size)) throw Skip("ranks share a GPU, and would fill it");
  options.partitions = false;
  options.compute_sms = options.communication_sms = 0;
  options.wait = GroupWait::kStreamMemory;
  Group group(options);
  Random random(60);
  for (int i = 0; i < cases(6); ++i) {
    const GatherCase call = random_gather(random, options.world_size, i % 2 == 1);
    group.run([&](Rank& rank) { GatherCall(rank, call).run_and_check_all(); });
  }
}

// Calls in a row without a look at the result between them, one rank late by turns: arrivals of one call
// never open the gates of the next (fault B07).
GPU_TEST(all_gather_calls_in_a_row_with_late_ranks) {
  for (const CommunicatorKind kind : kinds_for(world_sizes().front())) {
    Group group(few_sms(kind));
    GatherCase call;
    call.m = 512;
    call.n = 256;
    call.k = 128;
    for (const GemmForm form : kForms) {
      call.form = form;
      group.run([&](Rank& rank) {
        GatherCall own(rank, call);
        run_with_late_ranks(rank, own);
      });
    }
  }
}

// Fault B05 of the project's list, with its numbers.
GPU_TEST(all_gather_known_numbers) {
  if (world_sizes().front() != 2) throw Skip("the numbers are of 2 ranks");
  for (const CommunicatorKind kind : kinds_for(2)) {
    shared_group(2, kind).run([&](Rank& rank) {
      AllGatherGemm op(*rank.context,
                       {.m = 128, .n = 96, .k = 48, .dtype = DType::kFloat16, .partition = {}});
      DeviceMatrix a(128, 48, 48, DType::kFloat16);
      DeviceMatrix b(96, 48, 48, DType::kFloat16);
      const DeviceMatrix out(128, 96, 96, DType::kFloat16);
      std::vector<float> rows(128 * 48, std::numeric_limits<float>::quiet_NaN());
      const Integers own = known_a(rank.rank, 64, 48);
      std::copy(own.begin(), own.end(), rows.begin() + rank.rank * 64 * 48);
      a.fill(rows);
      b.fill(known_b(rank.rank, 96, 48));
      op({.a = a.data(),
          .lda = 48,
          .b = b.data(),
          .ldb = 48,
          .out = out.data(),
          .ldo = 96,
          .epilogue = {},
          .stream = rank.native_stream()});
      rank.stream->synchronize();
      const std::vector<float> got = out.read();
      const auto at = [&](std::size_t row, std::size_t col) { return got[row * 96 + col]; };
      if (rank.rank == 0) {
        GPU_EXPECT(at(0, 0) == -30 && at(64, 0) == -27 && at(127, 95) == -22,
                   at(0, 0) << " " << at(64, 0) << " " << at(127, 95));
      } else {
        GPU_EXPECT(at(0, 0) == 1 && at(127, 95) == 2, at(0, 0) << " " << at(127, 95));
      }
    });
  }
}

GPU_TEST(all_gather_in_a_graph) {
  const int world = world_sizes().front();
  if (const std::string why = why_no_nccl(world); !why.empty()) throw Skip(why);
  GroupOptions options = few_sms(CommunicatorKind::kNccl);
  options.poison = false;
  Group group(options);
  GatherCase call;
  call.m = 700;
  call.n = 300;
  call.k = 64;
  const auto capture = [&](Rank& rank) {
    GatherCall own(rank, call);
    own.run_and_check(Method::kOverlap, 1);
    auto* const stream = static_cast<cudaStream_t>(rank.native_stream());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    FLASHOVERLAP_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    own.enqueue(Method::kOverlap);
    FLASHOVERLAP_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    FLASHOVERLAP_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
    for (int i = 2; i < 5; ++i) {
      own.fill(Method::kOverlap, i);
      FLASHOVERLAP_CUDA_CHECK(cudaGraphLaunch(replay, stream));
      rank.stream->synchronize();
      own.check(Method::kOverlap, i);
    }
    FLASHOVERLAP_CUDA_CHECK(cudaGraphExecDestroy(replay));
    FLASHOVERLAP_CUDA_CHECK(cudaGraphDestroy(graph));
  };
  for (const GemmForm form : kForms) {
    call.form = form;
    group.run(capture);
  }
}

GPU_TEST(all_gather_refuses_what_cannot_run) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  const PlanOptions shape{.rank = 0,
                          .world_size = 2,
                          .dtype = DType::kFloat16,
                          .m = 512,
                          .n = 256,
                          .k = 64,
                          .tile_m = 128,
                          .tile_n = 128,
                          .resources = {},
                          .partition = {}};
  const auto communicators = make_local_gpu_communicators({0, 0});
  CudaOptions no_room;
  no_room.communication_sms = 0;
  const auto cramped = make_cuda_executor(communicators.front(), no_room);
  GPU_EXPECT_ERROR((void)cramped->prepare(plan_all_gather_gemm(shape, {})), "needs SMs left",
                   "communication_sms is 0");
  // The copy engine needs none; but a kernel that announces what it has copied does.
  const auto engines = make_local_gpu_communicators({0, 0}, {.link = {}, .copies = PeerCopy::kCopyEngine});
  GPU_EXPECT_ERROR(
      (void)make_cuda_executor(engines.front(), no_room)->prepare(plan_all_gather_gemm(shape, {})),
      "needs SMs left", "GroupWait::kStreamMemory");
  no_room.wait = GroupWait::kStreamMemory;
  (void)make_cuda_executor(engines.front(), no_room)->prepare(plan_all_gather_gemm(shape, {}));
  GPU_EXPECT_ERROR((void)cramped->prepare(plan_tail_free_reduce_scatter(shape, {})), "needs SMs left");
  GPU_EXPECT_ERROR((void)cramped->prepare(plan_all_to_all_gemm(shape, {})), "needs SMs left");
  // Nothing that waits takes an SM.
  no_room.form = GemmForm::kDecomposed;
  no_room.wait = GroupWait::kKernel;
  (void)make_cuda_executor(communicators.front(), no_room)->prepare(plan_all_gather_gemm(shape, {}));

  if (why_no_nccl(2).empty()) {
    shared_group(2, CommunicatorKind::kNccl).run([&](Rank& rank) {
      CudaOptions options;
      options.device = rank.options.device;
      options.communication_sms = 1;  // NCCL's calls of this group take more
      PlanOptions own = shape;
      own.rank = rank.rank;
      const auto executor_of_rank = make_cuda_executor(rank.communicator, options);
      GPU_EXPECT_ERROR((void)executor_of_rank->prepare(plan_all_gather_gemm(own, {})), "max_ctas",
                       "must be 1 to 1");
    });
  }

  GatherCase call;
  call.m = call.n = 128;
  call.k = 64;
  shared_group(2, CommunicatorKind::kLocal).run([&](Rank& rank) {
    GatherCall own(rank, call);
    const DeviceMatrix wide(128, 64, 72, DType::kFloat16);
    Operands operands = own.operands();
    operands.a = wide.data();
    operands.lda = wide.ld();
    GPU_EXPECT_ERROR(own.op()(operands), "leading dimension of a is 72", "must be dense: 64");
  });
}

// A rank that makes no call: the others throw within the time-out, and the GEMM that waits for its slice
// ends.
static void gather_without_one_rank(GemmForm form) {
  for (const CommunicatorKind kind : kinds_for(2)) {
    if (ranks_are_processes()) throw Skip("the ranks of other processes end with their own error");
    GroupOptions options = few_sms(kind);
    options.timeout = std::chrono::milliseconds(1500) * patience();
    std::vector<std::string> errors;
    {
      Group group(options);
      GatherCase call;
      call.m = 512;
      call.n = 256;
      call.k = 64;
      call.form = form;
      errors = group.run_all(
          [&](Rank& rank) {
            GatherCall own(rank, call);
            own.run_and_check(Method::kOverlap, 1);
            if (rank.rank == 1) return;
            own.enqueue(Method::kOverlap);
            rank.stream->synchronize();
            own.enqueue(Method::kOverlap);  // a stream of the caller's has no way to tell; the next call has
          },
          false);
    }
    GPU_EXPECT(errors[0].find("all-gather-gemm") != std::string::npos &&
                   errors[0].find("slice") != std::string::npos,
               name_of(kind) << ", " << name_of(form) << ": rank 0 says: " << errors[0]);
  }
}

GPU_TEST(all_gather_without_one_rank) {
  gather_without_one_rank(GemmForm::kPersistent);
}

GPU_TEST(all_gather_decomposed_without_one_rank) {
  gather_without_one_rank(GemmForm::kDecomposed);
}

}  // namespace flashoverlap::gpu_test

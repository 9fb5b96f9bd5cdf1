// What the GPU executor promises beyond results: graphs, hardware queues, several contexts, timelines, and
// errors before any launch.
#include <algorithm>
#include <cstdlib>
#include <thread>

#include "check.h"
#include "flashoverlap/plan_builders.h"
#include "gpu_case.h"
#include "gpu_test.h"
#include "sm_partition.h"

namespace flashoverlap::gpu_test {
namespace {

Case small_case(Op op, std::int64_t m, std::int64_t n, std::int64_t k) {
  Case call;
  call.op = op;
  call.gemm = {.m = m, .n = n, .k = k, .dtype = DType::kFloat16, .partition = {}};
  return call;
}

class Graph {
 public:
  Graph(void* stream, const std::function<void()>& body) : stream_(static_cast<cudaStream_t>(stream)) {
    FLASHOVERLAP_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    body();
    cudaGraph_t graph = nullptr;
    FLASHOVERLAP_CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
    FLASHOVERLAP_CUDA_CHECK(cudaGraphInstantiate(&executable_, graph, 0));
    FLASHOVERLAP_CUDA_CHECK(cudaGraphDestroy(graph));
  }
  ~Graph() { (void)cudaGraphExecDestroy(executable_); }
  void launch() const { FLASHOVERLAP_CUDA_CHECK(cudaGraphLaunch(executable_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

GPU_TEST(graph_capture_and_replay_with_nccl) {
  if (const std::string why = why_no_nccl(2); !why.empty()) throw Skip(why);
  GroupOptions options;
  options.kind = CommunicatorKind::kNccl;
  options.compute_sms = 8;
  options.poison = false;
  Group group(options);
  for (const Op op : {Op::kAllReduce, Op::kReduceScatter}) {
    const Case call = small_case(op, 1024, 1024, 64);
    std::vector<Expected> expected(3);
    group.run([&](Rank& rank) {
      RankCall own(rank, call);
      if (rank.rank == 0) {
        for (int i = 0; i < 3; ++i) {
          Case other = call;
          other.seed = i;
          expected[static_cast<std::size_t>(i)] = expected_of(other, 2, own.op().plan().grid.tile_m());
        }
      }
      own.enqueue(Method::kOverlap);  // warm-up
      rank.stream->synchronize();
      rank.communicator->exchange(std::uint64_t{0}, {.operation = "the reference is there"});
      const Graph graph(rank.native_stream(), [&] {
        own.enqueue(Method::kOverlap);
        own.enqueue(Method::kOverlap);
      });
      for (int i = 0; i < 3; ++i) {
        own.refill(i);
        own.poison();
        graph.launch();
        graph.launch();
        rank.stream->synchronize();
        own.check(expected[static_cast<std::size_t>(i)], "replay " + std::to_string(i));
      }
      own.run_and_check(expected[2], Method::kOverlap);
    });
  }
}

GPU_TEST(capture_with_the_local_communicator_is_refused) {
  GroupOptions options;
  options.compute_sms = 8;
  Group group(options);
  const auto errors = group.run_all(
      [&](Rank& rank) {
        RankCall own(rank, small_case(Op::kAllReduce, 1024, 1024, 64));
        auto* const stream = static_cast<cudaStream_t>(rank.native_stream());
        FLASHOVERLAP_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        std::string message;
        try {
          own.enqueue(Method::kOverlap);
        } catch (const Error& error) {
          message = error.what();
        }
        // Nothing of the call is in the capture.
        cudaGraph_t graph = nullptr;
        std::size_t nodes = 1;
        FLASHOVERLAP_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        FLASHOVERLAP_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
        FLASHOVERLAP_CUDA_CHECK(cudaGraphDestroy(graph));
        throw std::runtime_error(nodes == 0 ? message : "the call left nodes behind");
      },
      false);
  for (const std::string& error : errors)
    GPU_EXPECT(error.find("graph") != std::string::npos, "it says: " << error);
}

// A plan with transfers for one rank: what it takes to see whether one hardware queue is enough. Run this
// test alone with CUDA_DEVICE_MAX_CONNECTIONS=1, 8 and 32.
GPU_TEST(one_rank_with_transfers) {
  const char* const queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const std::string kind = queues == nullptr ? "default" : queues;
  for (const GroupWait wait : {GroupWait::kKernel, GroupWait::kStreamMemory}) {
    for (const SmSplit split : {SmSplit::kGrid, SmSplit::kGreen}) {
      std::shared_ptr<Communicator> communicator;
      if (why_no_nccl(1).empty()) {
        communicator =
            make_nccl_communicator(make_in_process_communicators(1).front(), {.device = 0, .max_ctas = 8});
      } else {
        communicator = make_local_gpu_communicators({0}).front();
      }
      CudaOptions options;
      options.split = split;
      options.wait = wait;
      options.poison_workspace = true;
      const auto executor = make_cuda_executor(communicator, options);
      const auto stream = make_cuda_stream(options);
      PlanOptions shape;
      shape.world_size = 2;
      shape.dtype = DType::kFloat16;
      shape.m = 2000;
      shape.n = 3000;
      shape.k = 64;
      const auto suggested =
          executor->suggest({.m = shape.m, .n = shape.n, .k = shape.k, .dtype = shape.dtype});
      shape.tile_m = suggested->tile_m;
      shape.tile_n = suggested->tile_n;
      shape.resources = {.compute_units = 6, .communication_units = 16};
      OverlapPlan plan = plan_all_reduce(shape);
      GPU_EXPECT(plan.groups.size() > 2, "the plan has only " << plan.groups.size() << " groups");
      plan.world_size = 1;
      const auto prepared = executor->prepare(std::move(plan));
      DeviceMatrix a(shape.m, shape.k, shape.k, shape.dtype);
      DeviceMatrix b(shape.n, shape.k, shape.k, shape.dtype);
      DeviceMatrix out(shape.m, shape.n, shape.n, shape.dtype);
      a.fill(known_a(0, shape.m, shape.k));
      b.fill(known_b(0, shape.n, shape.k));
      for (int i = 0; i < 20; ++i) {
        executor->execute(*prepared,
                          {.a = a.data(),
                           .lda = shape.k,
                           .b = b.data(),
                           .ldb = shape.k,
                           .out = out.data(),
                           .ldo = shape.n,
                           .epilogue = {},
                           .stream = native_handle(*stream)},
                          Mode::kRun, nullptr);
      }
      stream->synchronize();
      const auto expected =
          multiply(known_a(0, shape.m, shape.k), known_b(0, shape.n, shape.k), shape.m, shape.n, shape.k);
      const std::vector<float> got = out.read();
      for (std::size_t i = 0; i < got.size(); ++i) {
        GPU_EXPECT(got[i] == static_cast<float>(expected[i]), "queues " << kind << ": element " << i << " is "
                                                                        << got[i] << ", expected "
                                                                        << expected[i]);
      }
    }
  }
}

GPU_TEST(several_contexts_at_once) {
  constexpr int kContexts = 3;
  // Three groups of two ranks, each on its own SMs, at work at the same time.
  std::vector<int> sizes;
  for (int i = 0; i < kContexts * 3; ++i) sizes.push_back(cuda::kSmGroup);
  const auto parts = cuda::split_sms(0, sizes);
  const Case call = small_case(Op::kAllReduce, 1000, 1000, 64);
  Expected expected;
  std::vector<std::thread> threads;
  std::vector<std::string> errors(kContexts * 2);
  std::vector<std::vector<std::shared_ptr<Communicator>>> communicators;
  for (int i = 0; i < kContexts; ++i)
    communicators.push_back(make_local_gpu_communicators({0, 0}, {.link = {}, .max_ctas = 4}));
  expected = expected_of(call, 2, 1);
  for (std::size_t i = 0; i < kContexts * 2; ++i) {
    threads.emplace_back([&, i] {
      try {
        const std::size_t group = i / 2;
        Rank rank;
        rank.rank = static_cast<int>(i % 2);
        rank.world_size = 2;
        rank.communicator = communicators[group][i % 2];
        rank.options.partition = {.compute = parts[group * 3 + i % 2], .communication = parts[group * 3 + 2]};
        rank.options.poison_workspace = true;
        rank.context =
            std::make_unique<Context>(rank.communicator, make_cuda_executor(rank.communicator, rank.options));
        rank.stream = make_cuda_stream(rank.options);
        RankCall own(rank, call);
        for (int repeat = 0; repeat < 10; ++repeat) own.run_and_check(expected, Method::kOverlap);
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) GPU_EXPECT(error.empty(), error);
}

GPU_TEST(timeline_shows_transfers_under_the_gemm) {
  for (const CommunicatorKind kind : kinds_for(2)) {
    GroupOptions options;
    options.kind = kind;
    options.compute_sms = 8;
    Group group(options);
    group.run([&](Rank& rank) {
      RankCall own(rank, small_case(Op::kAllReduce, 4096, 2048, 8192));
      own.enqueue(Method::kOverlap);
      rank.stream->synchronize();
      Timeline timeline;
      own.op().run(own.operands(), Method::kOverlap, Mode::kRun, &timeline);
      const auto gemm = std::find_if(timeline.spans.begin(), timeline.spans.end(),
                                     [](const Span& span) { return span.kind == SpanKind::kCompute; });
      GPU_EXPECT(gemm != timeline.spans.end(), "no span of the GEMM");
      std::size_t transfers = 0;
      std::size_t under = 0;
      for (const Span& span : timeline.spans) {
        GPU_EXPECT(span.end_us >= span.begin_us, span.name << " ends before it begins");
        if (span.kind != SpanKind::kCommunication) continue;
        ++transfers;
        under += span.begin_us < gemm->end_us ? 1U : 0U;
      }
      GPU_EXPECT(transfers == own.op().plan().transfers.size(),
                 transfers << " spans for " << own.op().plan().transfers.size());
      GPU_EXPECT(under + 2 >= transfers && under > 0,
                 under << " of " << transfers << " transfers began under the GEMM");
    });
  }
}

GPU_TEST(modes_run_their_part) {
  shared_group(2, CommunicatorKind::kLocal).run([&](Rank& rank) {
    const Case call = small_case(Op::kReduceScatter, 700, 900, 64);
    RankCall own(rank, call);
    for (const Method method : {Method::kOverlap, Method::kSerial}) {
      for (const Mode mode : {Mode::kGemmOnly, Mode::kPlainGemm, Mode::kCommunicationOnly}) {
        own.op().run(own.operands(), method, mode, nullptr);
        rank.stream->synchronize();
      }
    }
    // They leave nothing behind that a full run would trip over.
    own.run_and_check(expected_of(call, 2, own.op().plan().grid.tile_m()), Method::kOverlap);
  });
}

GPU_TEST(bad_operands_are_refused) {
  shared_group(1, CommunicatorKind::kLocal).run([&](Rank& rank) {
    const auto try_with = [&](const std::function<void(Operands&)>& change,
                              std::initializer_list<const char*> parts) {
      RankCall own(rank, small_case(Op::kAllReduce, 64, 64, 32));
      Operands operands = own.operands();
      change(operands);
      expect_error(
          __FILE__, __LINE__, [&] { own.op()(operands); }, parts);
      for (const float value : own.out().read())
        GPU_EXPECT(value != value, "the output was written in spite of the error");
    };
    std::vector<std::uint16_t> host(64 * 64);
    try_with([](Operands& o) { o.a = nullptr; }, {"a is null", "64 x 32"});
    try_with([](Operands& o) { o.out = nullptr; }, {"out is null"});
    try_with([&](Operands& o) { o.b = host.data(); }, {"b at", "host memory"});
    try_with([](Operands& o) { o.lda = 31; }, {"leading dimension of a is 31", "at least its row length 32"});
    try_with([](Operands& o) { o.ldo = 63; }, {"leading dimension of out is 63"});
    try_with([](Operands& o) { o.a = static_cast<const char*>(o.a) + 1; }, {"a at", "not aligned"});
    try_with([](Operands& o) { o.out = const_cast<void*>(o.a); }, {"out at", "overlaps a at"});
    try_with([&](Operands& o) { o.epilogue.bias = host.data(); }, {"epilogue.bias", "host memory"});
  });
}

GPU_TEST(bad_options_are_refused) {
  const auto communicator = make_local_gpu_communicators({0}).front();
  GPU_EXPECT_ERROR((void)make_cuda_executor(nullptr, {}), "communicator is null");
  GPU_EXPECT_ERROR((void)make_local_gpu_communicators({99}), "device 99");
  GPU_EXPECT_ERROR((void)make_local_gpu_communicators({}), "0 ranks");
  GPU_EXPECT_ERROR((void)make_local_gpu_communicators({0}, {.link = {.bandwidth_gbps = -1, .latency_us = 0}}),
                   "-1 GB/s");
  CudaOptions options;
  options.device = 77;
  GPU_EXPECT_ERROR((void)make_cuda_executor(communicator, options), "device 77");
  GPU_EXPECT_ERROR((void)make_rehearsal(0, 2, 12, 8), "12 SMs", "multiple of 8");
  GPU_EXPECT_ERROR((void)make_rehearsal(0, 4, 64, 8), "264 SMs");
  GPU_EXPECT_ERROR((void)make_rehearsal(0, 0, 8, 8), "world_size is 0");

  CudaOptions summing;
  summing.sums = SumBy::kRestore;
  GPU_EXPECT_ERROR((void)make_cuda_executor(make_in_process_communicators(2).front(), summing),
                   "SumBy::kRestore", "make_local_gpu_communicators");

  const auto executor = make_cuda_executor(communicator, {});
  PlanOptions shape;
  shape.m = shape.n = shape.k = 256;
  GPU_EXPECT_ERROR((void)executor->prepare(plan_all_reduce(shape)), "f32");
  shape.dtype = DType::kBFloat16;
  shape.tile_m = 24;
  GPU_EXPECT_ERROR((void)executor->prepare(plan_all_reduce(shape)), "24x128", "there are");
  shape.world_size = 2;
  GPU_EXPECT_ERROR((void)executor->prepare(plan_all_reduce(shape)), "rank 0 of 2", "rank 0 of 1");
  OverlapPlan broken = plan_all_reduce(
      {.dtype = DType::kBFloat16, .m = 256, .n = 256, .k = 256, .resources = {}, .partition = {}});
  broken.schedule[0] = 99;
  GPU_EXPECT_ERROR((void)executor->prepare(std::move(broken)), "does not hold", "99");

  CudaOptions tight;
  tight.workspace_limit_bytes = 1000;
  const auto pair = make_local_gpu_communicators({0, 0});
  const auto small = make_cuda_executor(pair.front(), tight);
  PlanOptions large{.world_size = 2,
                    .dtype = DType::kFloat16,
                    .m = 4096,
                    .n = 4096,
                    .k = 64,
                    .resources = {},
                    .partition = {}};
  const auto tile = small->suggest({.m = large.m, .n = large.n, .k = large.k, .dtype = large.dtype});
  large.tile_m = tile->tile_m;
  large.tile_n = tile->tile_n;
  large.resources = tile->resources;
  GPU_EXPECT_ERROR((void)small->prepare(plan_all_reduce(large)), "bytes of workspace", "the limit is 1000");
}

}  // namespace flashoverlap::gpu_test

// Workspaces that NCCL knows: growing from call to call, plans that keep theirs, graphs, failures, and what
// is refused. All other tests run on them too, as further kinds of communicators.
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "flashoverlap/in_process.h"
#include "gpu_case.h"
#include "gpu_test.h"
#include "nccl_library.h"

namespace flashoverlap::gpu_test {
namespace {

constexpr CommunicatorKind kKinds[] = {CommunicatorKind::kNcclRegistered, CommunicatorKind::kNcclSymmetric};

/// Runs `body` with a new group of each kind that works here; skips the test where none does.
void with_each_kind(const std::function<void(Group&)>& body) {
  std::string why;
  bool has_run = false;
  for (const CommunicatorKind kind : kKinds) {
    GroupOptions options = few_sms(kind);
    why = why_no_buffers(options.world_size, kind);
    if (!why.empty()) continue;
    Group group(options);
    body(group);
    has_run = true;
  }
  if (!has_run) throw Skip(why);
}

Case case_of(Op op, std::int64_t m, std::int64_t n, int world_size) {
  Case call;
  call.op = op;
  call.gemm = {.m = m, .n = n, .k = 8, .dtype = DType::kFloat16, .partition = {}};
  if (op != Op::kAllToAll) return call;
  // Rank r has m rows less r for each of its number; each goes on to the next rank.
  for (int r = 0; r < world_size; ++r) {
    std::vector<std::int32_t> destinations(static_cast<std::size_t>(m - r));
    for (std::size_t i = 0; i < destinations.size(); ++i)
      destinations[i] =
          static_cast<std::int32_t>((i + static_cast<std::size_t>(r)) % static_cast<std::size_t>(world_size));
    call.destinations.push_back(std::move(destinations));
  }
  return call;
}

std::int64_t workspace_bytes(Group& group) {
  std::int64_t bytes = 0;
  group.run([&](Rank& rank) {
    if (rank.rank == group.first_rank()) bytes = rank.context->workspace_bytes();
  });
  return bytes;
}

/// A case with its operator on one rank, and what must come out.
struct Kept {
  Case call;
  std::vector<std::unique_ptr<RankCall>> calls;  ///< By rank.
  Expected expected;
};

Kept keep(Group& group, const Case& call) {
  Kept kept{.call = call, .calls = {}, .expected = {}};
  kept.calls.resize(static_cast<std::size_t>(group.options().world_size));
  group.run([&](Rank& rank) {
    auto& own = kept.calls[static_cast<std::size_t>(rank.rank)];
    own = std::make_unique<RankCall>(rank, call);
    if (rank.rank == group.first_rank())
      kept.expected = expected_of(call, rank.world_size, own->op().plan().grid.tile_m());
  });
  return kept;
}

void run(Group& group, const Kept& kept, Method method = Method::kOverlap) {
  group.run([&](Rank& rank) {
    kept.calls[static_cast<std::size_t>(rank.rank)]->run_and_check(kept.expected, method);
  });
}

}  // namespace

// Each size is too large for what the last one left. Plans go in between, but for those of the first size,
// which keep their workspace.
GPU_TEST(registered_workspace_grows) {
  with_each_kind([](Group& group) {
    const int world = group.options().world_size;
    std::vector<Kept> first;
    std::int64_t bytes = 0;
    for (const auto& [m, n] : {std::pair{700, 900}, {1500, 1024}, {2600, 1536}, {3000, 2048}}) {
      for (const Op op : {Op::kAllReduce, Op::kReduceScatter, Op::kAllToAll}) {
        const Case call = case_of(op, m, n, world);
        Kept kept = keep(group, call);
        run(group, kept);
        run(group, kept, Method::kSerial);
        if (first.size() < 3) first.push_back(std::move(kept));
      }
      GPU_EXPECT(workspace_bytes(group) > bytes, "it did not grow at m=" << m << " from " << bytes);
      bytes = workspace_bytes(group);
      for (const Kept& kept : first) run(group, kept);
    }
  });
}

// The parts that a rank carries out alone need no other rank, before the first whole call or after it.
GPU_TEST(registered_workspace_and_parts_of_a_call) {
  with_each_kind([](Group& group) {
    const Kept kept = keep(group, case_of(Op::kReduceScatter, 1100, 700, group.options().world_size));
    const auto alone = [&] {
      group.run([&](Rank& rank) {
        if (rank.rank != group.first_rank()) return;
        RankCall& own = *kept.calls[static_cast<std::size_t>(rank.rank)];
        for (const Mode mode : {Mode::kGemmOnly, Mode::kPlainGemm})
          own.op().run(own.operands(), Method::kOverlap, mode, nullptr);
        rank.stream->synchronize();
      });
    };
    alone();
    run(group, kept);
    alone();
    run(group, kept);
  });
}

GPU_TEST(registered_workspace_in_a_graph) {
  with_each_kind([](Group& group) {
    const int world = group.options().world_size;
    const Kept kept = keep(group, case_of(Op::kAllReduce, 1024, 768, world));
    const auto capture = [&](Rank& rank) {
      auto* const stream = static_cast<cudaStream_t>(rank.native_stream());
      cudaGraph_t graph = nullptr;
      FLASHOVERLAP_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      std::string refused;
      try {
        kept.calls[static_cast<std::size_t>(rank.rank)]->enqueue(Method::kOverlap);
      } catch (const Error& error) {
        refused = error.what();
      }
      FLASHOVERLAP_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
      return std::pair{graph, refused};
    };
    group.run([&](Rank& rank) {
      const auto [graph, refused] = capture(rank);
      GPU_EXPECT(refused.find("the first call of a plan cannot be captured") != std::string::npos,
                 "it says: " << refused);
      FLASHOVERLAP_CUDA_CHECK(cudaGraphDestroy(graph));
    });
    run(group, kept);
    std::vector<cudaGraphExec_t> replays(static_cast<std::size_t>(world));
    group.run([&](Rank& rank) {
      const auto [graph, refused] = capture(rank);
      GPU_EXPECT(refused.empty(), "it says: " << refused);
      FLASHOVERLAP_CUDA_CHECK(cudaGraphInstantiate(&replays[static_cast<std::size_t>(rank.rank)], graph, 0));
      FLASHOVERLAP_CUDA_CHECK(cudaGraphDestroy(graph));
    });
    // The workspace grows twice: what nobody holds is given back, but the graph's plan holds its own.
    for (const std::int64_t m : {2000, 4000})
      run(group, keep(group, case_of(Op::kAllReduce, m, 1536, world)));
    group.run([&](Rank& rank) {
      RankCall& own = *kept.calls[static_cast<std::size_t>(rank.rank)];
      own.poison();
      FLASHOVERLAP_CUDA_CHECK(cudaGraphLaunch(replays[static_cast<std::size_t>(rank.rank)],
                                              static_cast<cudaStream_t>(rank.native_stream())));
      rank.stream->synchronize();
      own.check(kept.expected, "replay");
      FLASHOVERLAP_CUDA_CHECK(cudaGraphExecDestroy(replays[static_cast<std::size_t>(rank.rank)]));
    });
  });
}

// A rank that makes no call where the others would register memory for theirs; then the group goes, with
// registered memory in an aborted communicator. All within the time-out and some seconds.
GPU_TEST(registered_workspace_and_a_rank_that_fails) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  with_each_kind([](Group& healthy) {
    const auto begin = std::chrono::steady_clock::now();
    {
      GroupOptions options = healthy.options();
      options.timeout = std::chrono::milliseconds(2000);
      Group group(options);
      run(group, keep(group, case_of(Op::kAllReduce, 1500, 1024, options.world_size)));
      const Kept larger = keep(group, case_of(Op::kAllReduce, 3000, 1536, options.world_size));
      const auto errors = group.run_all(
          [&](Rank& rank) {
            if (rank.rank == 1) throw std::runtime_error("thrown on purpose");
            larger.calls[static_cast<std::size_t>(rank.rank)]->enqueue(Method::kOverlap);
            rank.stream->synchronize();
          },
          true);
      GPU_EXPECT(!errors[0].empty(), "rank 0 went on alone");
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    GPU_EXPECT(took.count() < 20, "it took " << took.count() << " s");
    run_case(healthy, case_of(Op::kAllReduce, 900, 700, healthy.options().world_size));
  });
}

namespace {

/// Makes communicators of two ranks; returns what each throws, empty where it throws nothing.
std::vector<std::string> errors_of(const std::vector<int>& devices, const std::vector<NcclBuffers>& buffers) {
  std::vector<std::string> errors(devices.size());
  std::vector<std::thread> threads;
  for (const auto& control : make_in_process_communicators(static_cast<int>(devices.size()))) {
    threads.emplace_back([&, control, r = static_cast<std::size_t>(control->rank())] {
      try {
        (void)make_nccl_communicator(control, {.device = devices[r], .max_ctas = 8, .buffers = buffers[r]});
      } catch (const Error& error) {
        errors[r] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void expect_all(const std::vector<std::string>& errors, const std::string& part) {
  for (const std::string& error : errors)
    GPU_EXPECT(error.find(part) != std::string::npos, "it says: '" << error << "', not: " << part);
}

}  // namespace

GPU_TEST(registered_buffers_that_are_refused) {
  if (const std::string why = why_no_nccl(1); !why.empty()) throw Skip(why);
  if (ranks_are_processes()) throw Skip("ranks are processes");
  for (const CommunicatorKind kind : kKinds) {
    const bool is_window = kind == CommunicatorKind::kNcclSymmetric;
    const NcclBuffers buffers = is_window ? NcclBuffers::kSymmetric : NcclBuffers::kRegistered;
    const cuda::NcclLibrary& library = cuda::nccl();
    const bool is_old = library.comm_revoke == nullptr;
    expect_all(errors_of({0, 0}, {buffers, buffers}), is_old ? "buffers need NCCL 2.30.7" : "share the GPU");
    if (is_old) continue;
    expect_all(errors_of({0, 0}, {NcclBuffers::kPlain, buffers}), "NcclOptions::buffers is plain on rank 0");
    // Alone there is nothing to register.
    GPU_EXPECT(errors_of({0}, {buffers}).front().empty(), "one rank cannot have them");
  }
}

}  // namespace flashoverlap::gpu_test

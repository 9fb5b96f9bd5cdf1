// Faults that users of such libraries met (the ids are the project's own list of them), on data D1 with check
// sums that were computed elsewhere. fp16 holds all of these sums exactly.
#include <array>
#include <random>
#include <thread>

#include "check.h"
#include "gpu_case.h"
#include "gpu_test.h"

namespace flashoverlap::gpu_test {
namespace {

Case known_case(Op op, std::int64_t m, std::int64_t n, std::int64_t k) {
  Case call;
  call.op = op;
  call.gemm.m = m;
  call.gemm.n = n;
  call.gemm.k = k;
  call.gemm.dtype = DType::kFloat16;
  return call;
}

// Adds up the check sums of all ranks' rows of a reduce-scatter, or of one rank's all-reduce.
void expect_sums(Group& group, const Case& call, double sum, double weighted) {
  const int world = group.options().world_size;
  std::vector<CheckSums> sums(static_cast<std::size_t>(world));
  for (const Method method : {Method::kOverlap, Method::kSerial}) {
    group.run([&](Rank& rank) {
      RankCall own(rank, call);
      own.enqueue(method);
      rank.stream->synchronize();
      const std::int64_t first =
          call.op == Op::kReduceScatter
              ? owned_rows(call.gemm.m, 1, world, rank.rank, RowOwnership::kContiguous).front()
              : 0;
      sums[static_cast<std::size_t>(rank.rank)] = check_sums(own.out().read(), call.gemm.n, first);
    });
    CheckSums all;
    for (const CheckSums& rank : sums) {
      if (call.op == Op::kAllReduce) {
        GPU_EXPECT(rank.sum == sum && rank.weighted == weighted,
                   call.text() << ": S=" << rank.sum << " W=" << rank.weighted << ", expected " << sum << " "
                               << weighted);
      }
      all.sum += rank.sum;
      all.weighted += rank.weighted;
    }
    if (call.op == Op::kReduceScatter) {
      GPU_EXPECT(all.sum == sum && all.weighted == weighted, call.text()
                                                                 << ": S=" << all.sum << " W=" << all.weighted
                                                                 << ", expected " << sum << " " << weighted);
    }
  }
}

}  // namespace

GPU_TEST(b01_ragged_last_tile) {
  for (const Op op : {Op::kAllReduce, Op::kReduceScatter}) {
    for (const CommunicatorKind kind : kinds_for(4)) {
      expect_sums(shared_group(2, kind), known_case(op, 256, 576, 64), 436, -29161);
      expect_sums(shared_group(4, kind), known_case(op, 256, 576, 64), 776, -3982);
      expect_sums(shared_group(2, kind), known_case(op, 300, 130, 64), 157, 6569);
    }
  }
}

GPU_TEST(b03_fewer_rows_than_a_tile) {
  struct Row {
    std::int64_t m;
    double s2, w2, s4, w4;
  };
  for (const Row& row :
       {Row{1, -670, -2076, -594, 7}, Row{8, -123, -5669, 73, 5786}, Row{16, -385, -38632, -67, -32377},
        Row{32, -647, -37256, -1087, -58009}, Row{63, 211, -27049, -627, -69616}}) {
    for (const CommunicatorKind kind : kinds_for(4)) {
      expect_sums(shared_group(2, kind), known_case(Op::kAllReduce, row.m, 128, 256), row.s2, row.w2);
      expect_sums(shared_group(4, kind), known_case(Op::kAllReduce, row.m, 128, 256), row.s4, row.w4);
    }
  }
  expect_sums(shared_group(4, CommunicatorKind::kLocal), known_case(Op::kReduceScatter, 8, 128, 256), 73,
              5786);
}

GPU_TEST(b05_subgroup_of_ranks) {
  for (const CommunicatorKind kind : kinds_for(4)) {
    for (const std::array<int, 2> listed : {std::array<int, 2>{2, 3}, std::array<int, 2>{3, 2}}) {
      shared_group(4, kind).run([&](Rank& rank) {
        if (rank.rank < 2) return;
        Rank sub;
        sub.communicator = rank.communicator->subgroup(listed);
        sub.rank = rank.rank;  // the data's key is the global rank
        sub.world_size = 2;
        sub.options = rank.options;
        sub.context =
            std::make_unique<Context>(sub.communicator, make_cuda_executor(sub.communicator, sub.options));
        sub.stream = make_cuda_stream(sub.options);
        RankCall call(sub, known_case(Op::kAllReduce, 64, 64, 64));
        call.enqueue(Method::kOverlap);
        sub.stream->synchronize();
        const std::vector<float> c = call.out().read();
        GPU_EXPECT(c.front() == -52 && c.back() == 71, "C[0,0]=" << c.front() << " C[63,63]=" << c.back());
      });
    }
  }
}

GPU_TEST(b07_signals_are_ready_for_the_next_call) {
  struct Step {
    std::int64_t seed;
    double sum, weighted;
  };
  for (const CommunicatorKind kind : kinds_for(2)) {
    Case call = known_case(Op::kAllReduce, 512, 256, 128);
    call.gemm.tile_m = 128;
    call.gemm.tile_n = 128;
    shared_group(2, kind).run([&](Rank& rank) {
      RankCall own(rank, call);
      for (const Step& step : {Step{0, -551, 8491}, Step{10, 230, -14175}, Step{20, -120, -5408}}) {
        own.refill(step.seed);
        own.poison();
        if (rank.rank == 1 && step.seed > 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        own.enqueue(Method::kOverlap);
        rank.stream->synchronize();
        const CheckSums sums = check_sums(own.out().read(), 256);
        GPU_EXPECT(sums.sum == step.sum && sums.weighted == step.weighted,
                   "S=" << sums.sum << " W=" << sums.weighted);
      }
    });
  }
}

GPU_TEST(b09_shapes_and_operators_in_turn) {
  constexpr int kCalls = 200;
  for (const CommunicatorKind kind : kinds_for(4)) {
    std::vector<Case> cases{
        known_case(Op::kAllReduce, 1024, 256, 32), known_case(Op::kAllReduce, 16, 256, 32),
        known_case(Op::kAllReduce, 384, 1032, 32), known_case(Op::kReduceScatter, 1024, 256, 32),
        known_case(Op::kAllToAll, 0, 256, 32)};
    for (int r = 0; r < 4; ++r) {
      std::vector<std::int32_t> destinations;
      for (int i = 0; i < 300 + 10 * r; ++i) destinations.push_back((i * 7 + r) % 4);
      cases.back().destinations.push_back(destinations);
    }
    std::vector<Expected> expected;
    Group& group = shared_group(4, kind);
    group.run([&](Rank& rank) {
      std::vector<std::unique_ptr<RankCall>> calls;
      for (const Case& call : cases) calls.push_back(std::make_unique<RankCall>(rank, call));
      if (rank.rank == 0) {
        for (std::size_t i = 0; i < cases.size(); ++i) {
          expected.push_back(expected_of(cases[i], 4, calls[i]->op().plan().grid.tile_m()));
        }
      }
      rank.communicator->exchange(std::uint64_t{0}, {.operation = "the reference is there"});
      std::mt19937 random(static_cast<unsigned>(seed()) + static_cast<unsigned>(rank.rank));
      // X, Y, Z, Y, X, Z, ...; from the 100th call on the other operators take part.
      constexpr std::array<int, 6> kOrder{0, 1, 2, 1, 0, 2};
      for (int i = 0; i < kCalls; ++i) {
        const int which =
            i >= kCalls / 2 && i % 3 == 0 ? 3 + i / 3 % 2 : kOrder[static_cast<std::size_t>(i % 6)];
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
        RankCall& call = *calls[static_cast<std::size_t>(which)];
        if (i % 10 == 9) call.poison();
        call.enqueue(Method::kOverlap);
        if (i % 10 != 9) continue;
        rank.stream->synchronize();
        call.check(expected[static_cast<std::size_t>(which)], "call " + std::to_string(i));
      }
      for (std::size_t i = 0; i < calls.size(); ++i) calls[i]->run_and_check(expected[i], Method::kOverlap);
    });
  }
}

GPU_TEST(b11_every_call_sees_its_own_data) {
  constexpr int kCalls = 1000;
  for (const int world : {2, 4}) {
    for (const CommunicatorKind kind : kinds_for(world)) {
      const Case call = known_case(Op::kAllReduce, 16, 128, 16);
      shared_group(world, kind).run([&](Rank& rank) {
        RankCall own(rank, call);
        std::vector<std::unique_ptr<DeviceMatrix>> inputs;
        std::vector<std::vector<std::int32_t>> expected(5, std::vector<std::int32_t>(16 * 128, 0));
        for (int c = 0; c < 5; ++c) {
          for (int r = 0; r < world; ++r) {
            Integers a = known_a(r, 16, 16);
            for (auto& element : a) element = static_cast<std::int16_t>(element + c);
            if (r == rank.rank) {
              inputs.push_back(std::make_unique<DeviceMatrix>(16, 16, 16, DType::kFloat16));
              inputs.back()->fill(a);
            }
            const auto product = multiply(a, known_b(r, 128, 16), 16, 128, 16);
            for (std::size_t i = 0; i < product.size(); ++i)
              expected[static_cast<std::size_t>(c)][i] += product[i];
          }
        }
        for (int i = 0; i < kCalls; ++i) {
          const auto c = static_cast<std::size_t>(i % 5);
          own.operands().a = inputs[c]->data();
          own.enqueue(Method::kOverlap);
          rank.stream->synchronize();
          const std::vector<float> got = own.out().read();
          for (std::size_t e = 0; e < got.size(); ++e) {
            GPU_EXPECT(got[e] == static_cast<float>(expected[c][e]),
                       "call " << i << " element " << e << " is " << got[e]);
          }
        }
      });
    }
  }
}

GPU_TEST(b13_offsets_beyond_two_to_the_31) {
  constexpr std::int64_t kRows = 65536;
  constexpr std::int64_t kCols = 32769;
  shared_group(1, CommunicatorKind::kLocal).run([&](Rank& rank) {
    GemmAllReduce op(*rank.context,
                     {.m = kRows, .n = kCols, .k = 16, .dtype = DType::kFloat16, .partition = {}});
    DeviceMatrix a(kRows, 16, 16, DType::kFloat16);
    DeviceMatrix b(kCols, 16, 16, DType::kFloat16);
    a.fill(known_a(0, kRows, 16));
    b.fill(known_b(0, kCols, 16));
    const cuda::DeviceBuffer out(0, kRows * kCols * 2, "the large output");
    op({.a = a.data(),
        .lda = 16,
        .b = b.data(),
        .ldb = 16,
        .out = out.data(),
        .ldo = kCols,
        .epilogue = {},
        .stream = rank.native_stream()});
    rank.stream->synchronize();
    const auto at = [&](std::int64_t i, std::int64_t j) {
      std::uint16_t bits = 0;
      FLASHOVERLAP_CUDA_CHECK(
          cudaMemcpy(&bits, static_cast<char*>(out.data()) + (i * kCols + j) * 2, 2, cudaMemcpyDeviceToHost));
      return bits;
    };
    // 24, 16 and 2 in fp16. (The list that this case comes from gives 0 for the last; its own formula
    // gives 2.)
    GPU_EXPECT(at(kRows - 1, kCols - 1) == 0x4E00, "C[65535,32768] has bits " << at(kRows - 1, kCols - 1));
    GPU_EXPECT(at(kRows - 2, kCols - 2) == 0x4C00, "C[65534,32767] has bits " << at(kRows - 2, kCols - 2));
    GPU_EXPECT(at(0, 0) == 0x4000, "C[0,0] has bits " << at(0, 0));
  });
}

GPU_TEST(b15_all_to_all_with_nothing_to_send) {
  const auto rows_to = [](std::initializer_list<std::int64_t> splits) {
    std::vector<std::int32_t> destinations;
    std::int32_t rank = 0;
    for (const std::int64_t rows : splits)
      destinations.insert(destinations.end(), static_cast<std::size_t>(rows), rank++);
    return destinations;
  };
  for (const CommunicatorKind kind : kinds_for(3)) {
    Case call = known_case(Op::kAllToAll, 128, 128, 64);
    call.destinations = {rows_to({64, 64}), {}};
    run_case(shared_group(2, kind), call);
    call.destinations = {{}, {}};
    call.gemm.m = 0;
    run_case(shared_group(2, kind), call);
    call.destinations = {rows_to({0, 5, 0}), {}, rows_to({7, 0, 0})};
    call.gemm.m = 7;
    run_case(shared_group(3, kind), call);
  }
}

// Budgets of SMs for communication from none to all but one, and another stream that keeps the GPU busy.
GPU_TEST(b25_waiter_and_worker_together) {
  cudaDeviceProp properties{};
  FLASHOVERLAP_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  const int all = properties.multiProcessorCount;
  for (const int budget : {0, 1, 8, all - 2}) {
    GroupOptions options;
    options.partitions = false;
    options.communication_sms = budget;
    Group group(options);
    Case call = known_case(Op::kAllReduce, 4096, 1024, 8);
    run_case(group, call);
  }
  for (const int budget : {all, all + 1, -1}) {
    const auto communicator = make_local_gpu_communicators({0}).front();
    CudaOptions options;
    options.communication_sms = budget;
    GPU_EXPECT_ERROR((void)make_cuda_executor(communicator, options), "communication_sms",
                     std::to_string(budget).c_str());
  }
}

GPU_TEST(b31_epilogue_once_on_the_sum) {
  for (int world = 1; world <= 4; ++world) {
    for (const Op op : {Op::kAllReduce, Op::kReduceScatter}) {
      shared_group(world, CommunicatorKind::kLocal).run([&](Rank& rank) {
        RankCall own(rank, known_case(op, 64, 64, 32));
        DeviceMatrix zeros_a(64, 32, 32, DType::kFloat16);
        DeviceMatrix zeros_b(64, 32, 32, DType::kFloat16);
        DeviceMatrix bias(1, 64, 64, DType::kFloat16);
        zeros_a.fill(Integers(64 * 32, 0));
        zeros_b.fill(Integers(64 * 32, 0));
        bias.fill(Integers(64, 1));
        own.operands().a = zeros_a.data();
        own.operands().lda = 32;
        own.operands().b = zeros_b.data();
        own.operands().ldb = 32;
        own.operands().epilogue.bias = bias.data();
        for (const Method method : {Method::kOverlap, Method::kSerial}) {
          own.poison();
          own.enqueue(method);
          rank.stream->synchronize();
          for (const float value : own.out().read())
            GPU_EXPECT(value == 1, "bias 1 gives " << value << " with " << world << " ranks");
        }
      });
    }
  }
}

// The operator goes right after its call, and the memory of its tables to somebody else, while the device
// still works with them.
GPU_TEST(b39_operator_goes_away_right_after_the_call) {
  constexpr int kRounds = 60;
  for (const CommunicatorKind kind : kinds_for(2)) {
    const Case call = known_case(Op::kAllReduce, 1024, 256, 64);
    const Expected expected = expected_of(call, 2, 1);
    shared_group(2, kind).run([&](Rank& rank) {
      RankCall own(rank, call);
      for (int round = 0; round < kRounds; ++round) {
        auto op = std::make_unique<GemmAllReduce>(*rank.context, call.gemm);
        op->run(own.operands(), round % 3 == 2 ? Method::kSerial : Method::kOverlap, Mode::kRun, nullptr);
        op.reset();
        const DeviceMatrix reused(64, 256, 256, DType::kFloat16);  // poisoned
        if (round % 10 != 9) continue;
        rank.stream->synchronize();
        own.check(expected, "round " + std::to_string(round));
        own.poison();
      }
    });
  }
}

}  // namespace flashoverlap::gpu_test

// The layer of experts whose results a consumer puts into their owners' memory.
#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include "gpu_test.h"
#include "moe_layer_call.h"

namespace flashoverlap::gpu_test {
namespace {

using namespace std::chrono_literals;

constexpr CommunicatorKind kKinds[] = {CommunicatorKind::kLocal, CommunicatorKind::kTwoStep,
                                       CommunicatorKind::kCopyEngine};

void run_case_by_puts(int world, CommunicatorKind kind, const MoeCase& call) {
  shared_group(world, kind).run([&](Rank& rank) {
    LayerCall own(rank, call);
    for (const Method method : {Method::kOverlap, Method::kSerial, Method::kOverlap})
      own.run_and_check(method);
  });
}

/// All tokens of all ranks, or of one rank alone, to the expert `expert`.
MoeCase one_expert(int world, std::int32_t expert, std::int32_t only_rank) {
  MoeCase call = small_case(world);
  for (std::int32_t rank = 0; rank < world; ++rank) {
    MoeRouting& routing = call.routings[index(rank)];
    if (only_rank >= 0 && rank != only_rank) {
      routing = make_routing(RoutingKind::kBalanced, rank, world, 0, 4, 1, 1);
      continue;
    }
    routing = make_routing(RoutingKind::kBalanced, rank, world, 300, 4, 1, 1);
    for (std::int32_t& to : routing.experts) to = expert;
  }
  return call;
}

/// Carries out all plans but the returns of one call, in which this rank puts nothing: as one that hangs
/// there.
class Silent final : public Executor {
 public:
  Silent(std::unique_ptr<Executor> executor, int silent_call)
      : executor_(std::move(executor)), silent_call_(silent_call) {}
  [[nodiscard]] std::unique_ptr<PreparedPlan> prepare(OverlapPlan plan) override {
    return executor_->prepare(std::move(plan));
  }
  void execute(PreparedPlan& prepared, const Operands& operands, Mode mode, Timeline* timeline) override {
    if (prepared.plan().operation == "moe-combine" && calls_++ == silent_call_) return;
    executor_->execute(prepared, operands, mode, timeline);
  }
  [[nodiscard]] std::shared_ptr<plan::MoeDevice> make_moe_device() const override {
    return executor_->make_moe_device();
  }
  [[nodiscard]] std::int64_t workspace_bytes() const override { return executor_->workspace_bytes(); }

 private:
  std::unique_ptr<Executor> executor_;
  int silent_call_;
  int calls_ = 0;
};

/// Many calls of a layer that changes itself, the last one checked.
void run_changing(Rank& rank, const MoeCase& call, int calls,
                  const std::function<void(const MoeReport&)>& look) {
  LayerCall own(rank, call);
  const DeviceMatrix out = own.make_out();
  for (int i = 0; i < calls; ++i) {
    look(own.enqueue(own.routing(), out, Method::kOverlap));
    if (i % 3 == 0) rank.stream->synchronize();  // else calls end long after the next ones begin
  }
  own.run_and_check(Method::kOverlap);
}

MoeCase large_case(int world) {
  MoeCase call = small_case(world);
  call.options.hidden = 512;
  call.options.intermediate = 128;
  for (std::int32_t rank = 0; rank < world; ++rank)
    call.routings[index(rank)] = make_routing(RoutingKind::kStress, rank, world, 1500, 4, 2, 1);
  return call;
}

/// What ranks say of which one fails, all within the time-out and some.
std::vector<std::string> errors_of(int world, const std::function<void(Rank&)>& body) {
  GroupOptions options;
  options.world_size = world;
  options.timeout = 1500ms;
  const auto started = std::chrono::steady_clock::now();
  std::vector<std::string> errors;
  {
    Group group(options);
    errors = group.run_all(body, true);
  }
  GPU_EXPECT(std::chrono::steady_clock::now() - started < 15s, "the time-out is 1.5 s");
  return errors;
}

}  // namespace

GPU_TEST(moe_put_random) {
  for (const int world : world_sizes()) {
    std::mt19937_64 rng(seed() + 300 + static_cast<std::uint64_t>(world));
    for (const CommunicatorKind kind : kKinds) {
      for (int i = 0; i < cases(8); ++i)
        run_case_by_puts(world, kind, with_puts(random_case(rng, world, 500), rng));
    }
  }
}

GPU_TEST(moe_put_one_expert) {
  std::mt19937_64 rng(seed());
  for (const int world : world_sizes()) {
    for (const std::int32_t expert : {0, 3}) {
      for (const std::int32_t only_rank : {-1, 0, world - 1})
        run_case_by_puts(world, CommunicatorKind::kLocal,
                         with_puts(one_expert(world, expert, only_rank), rng));
    }
  }
}

// Rows that are no multiple of 16 bytes.
GPU_TEST(moe_put_odd_sizes) {
  std::mt19937_64 rng(seed());
  const int world = world_sizes().front();
  MoeCase call = with_puts(small_case(world), rng);
  call.options.hidden = 37;
  call.options.intermediate = 19;
  call.options.tile_m = call.options.tile_n = 128;
  run_case_by_puts(world, CommunicatorKind::kLocal, call);
}

// Other counts in each call, ranks late at random: nobody may overwrite what another has yet to read.
GPU_TEST(moe_put_calls_in_a_row) {
  for (const int world : world_sizes()) {
    for (const CommunicatorKind kind : {CommunicatorKind::kLocal, CommunicatorKind::kCopyEngine}) {
      std::mt19937_64 rng(seed() + static_cast<std::uint64_t>(world));
      const MoeCase call = with_puts(small_case(world), rng);
      shared_group(world, kind).run([&](Rank& rank) { run_late_calls_in_a_row(rank, call); });
    }
  }
}

// Consumers that mostly wait become fewer, on all ranks alike.
GPU_TEST(moe_put_adapts) {
  for (const int world : world_sizes()) {
    MoeCase call = large_case(world);
    call.options.transport = MoeTransport::kPut;
    call.options.consumers = 16;
    call.options.adapt = true;
    call.options.controller.max_consumers = 24;
    call.options.controller.consumer_step = 3;
    shared_group(world, CommunicatorKind::kLocal).run([&](Rank& rank) {
      MoeSetting setting;
      int decisions = 0;
      run_changing(rank, call, 40, [&](const MoeReport& report) {
        setting = report.setting;
        decisions += report.adaptation.empty() ? 0 : 1;
      });
      GPU_EXPECT(decisions > 5, "the controller heard of " << decisions << " calls of 40");
      const auto all = rank.communicator->exchange(static_cast<std::uint64_t>(setting.consumers), {});
      for (const std::uint64_t other : all)
        GPU_EXPECT(other == all.front(), "ranks have " << all.front() << " and " << other << " consumers");
    });
  }
}

GPU_TEST(moe_put_measures_whether_to_overlap) {
  std::mt19937_64 rng(seed());
  for (const int world : world_sizes()) {
    MoeCase call = with_puts(small_case(world), rng);
    call.options.overlap_if = MoeOverlapIf::kMeasured;
    shared_group(world, CommunicatorKind::kLocal).run([&](Rank& rank) {
      int serial = 0;
      std::string choice;
      run_changing(rank, call, 12, [&](const MoeReport& report) {
        serial += report.method == Method::kSerial ? 1 : 0;
        choice = report.choice;
      });
      GPU_EXPECT(serial >= 4, serial << " serial calls; four of the trials are");
      GPU_EXPECT(choice.find("medians of 3 calls") != std::string::npos, "the choice is " << choice);
    });
  }
}

// Ranks that share all SMs of one device: GEMMs and consumers may not keep each other from running.
GPU_TEST(moe_put_on_shared_sms) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  const int world = 2;
  GroupOptions options;
  options.world_size = world;
  options.partitions = false;
  Group group(options);
  std::mt19937_64 rng(seed());
  for (int i = 0; i < 4; ++i) {
    const MoeCase call = with_puts(random_case(rng, world, 2000), rng);
    group.run([&](Rank& rank) {
      LayerCall own(rank, call);
      for (int repeat = 0; repeat < 3; ++repeat) own.run_and_check(Method::kOverlap);
    });
  }
}

// A rank that puts nothing: the others say so, naming it, within the time-out.
GPU_TEST(moe_put_names_the_rank_that_is_missing) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  const int world = 3;
  constexpr int kSilent = 1;
  std::mt19937_64 rng(seed());
  const MoeCase call = with_puts(small_case(world), rng);
  const std::vector<std::string> errors = errors_of(world, [&](Rank& rank) {
    if (rank.rank == kSilent) {
      rank.context = std::make_unique<Context>(
          rank.communicator,
          std::make_unique<Silent>(make_cuda_executor(rank.communicator, rank.options), 1));
    }
    LayerCall own(rank, call);
    own.run_and_check(Method::kOverlap);
    const DeviceMatrix out = own.make_out();
    for (int i = 0; i < 2; ++i) {
      (void)own.enqueue(own.routing(), out, Method::kOverlap);
      rank.stream->synchronize();
      // Or this rank would miss the others, who wait for it on their devices.
      if (rank.rank == kSilent) std::this_thread::sleep_for(2s);
    }
  });
  bool is_named = false;
  for (const std::string& error : errors) {
    GPU_EXPECT(!error.empty(), "a rank has noticed nothing");
    is_named = is_named || error.find("rank 1 did not put its results in time") != std::string::npos;
  }
  GPU_EXPECT(is_named, "the others say: " << errors[0] << "; " << errors[2]);
}

// A rank that dies in the middle of a call.
GPU_TEST(moe_put_rank_dies) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  const int world = 2;
  std::mt19937_64 rng(seed());
  const MoeCase call = with_puts(small_case(world), rng);
  const std::vector<std::string> errors = errors_of(world, [&](Rank& rank) {
    LayerCall own(rank, call);
    own.run_and_check(Method::kOverlap);
    if (rank.rank == 1) throw std::runtime_error("thrown on purpose");
    own.run_and_check(Method::kOverlap);
  });
  GPU_EXPECT(errors[0].find("thrown on purpose") != std::string::npos, "the other rank says: " << errors[0]);
}

GPU_TEST(moe_put_refuses_what_cannot_run) {
  if (ranks_are_processes()) throw Skip("ranks are processes");
  const int world = 2;
  std::mt19937_64 rng(seed());
  const MoeCase good = with_puts(small_case(world), rng);
  shared_group(world, CommunicatorKind::kLocal).run([&](Rank& rank) {
    MoeCase call = good;
    call.options.order = MoeOrder::kExpertMajor;
    GPU_EXPECT_ERROR(MoeLayer(*rank.context, call.options), "order 'owner-major'", "'expert-major'");
    call = good;
    call.options.consumers = 1000;
    GPU_EXPECT_ERROR(MoeLayer(*rank.context, call.options), "consumers is 1000", "at most");
  });
  if (const std::string why = why_no_nccl(world); !why.empty()) return;
  shared_group(world, CommunicatorKind::kNccl).run([&](Rank& rank) {
    GPU_EXPECT_ERROR(MoeLayer(*rank.context, good.options), "transport 'put'", "use transport 'collective'");
  });
}

}  // namespace flashoverlap::gpu_test

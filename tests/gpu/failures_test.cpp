// One rank of an NCCL group fails, at each stage of a call and with each operator: every other rank gets an
// error within the time-out plus 5 s, and a new group works afterwards. tests/failures has the same for
// hosts.
//
// Ranks are threads, so that a fault is one of: it throws; it leaves without a word; it stays away for longer
// than the time-out; it is slow within it; it has no memory; it has another plan. NCCL itself does not say
// who is missing: what must be named is the call, and where the failing rank still speaks, that rank.
#include <chrono>
#include <new>
#include <stdexcept>
#include <thread>

#include "gpu_case.h"
#include "gpu_test.h"

namespace flashoverlap::gpu_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTimeout = 1500ms;
constexpr auto kAllowed = kTimeout + 5s;
constexpr int kVictim = 1;

enum class Fault { kThrow, kLeave, kStop, kSlow, kOutOfMemory, kWrongPlan };
enum class Stage { kStart, kPlanned, kGroup, kLast };

const char* name_of(Fault fault) {
  constexpr const char* kNames[] = {"throw", "leave", "stop", "slow", "out-of-memory", "wrong-plan"};
  return kNames[static_cast<int>(fault)];
}

const char* name_of(Stage stage) {
  constexpr const char* kNames[] = {"start", "planned", "group", "last"};
  return kNames[static_cast<int>(stage)];
}

/// Ends a rank's work without a word to the others.
struct Left {};

void happen(Fault fault) {
  switch (fault) {
    case Fault::kThrow:
      throw std::runtime_error("thrown on purpose");
    case Fault::kOutOfMemory:
      throw std::bad_alloc();
    case Fault::kLeave:
      throw Left{};
    case Fault::kStop:
      return std::this_thread::sleep_for(kTimeout + 3s);
    case Fault::kSlow:
      return std::this_thread::sleep_for(kTimeout / 2);
    case Fault::kWrongPlan:
      return;
  }
}

/// A communicator whose second collective in a row does not come: between the transfers of two wave groups.
class Interrupted final : public Communicator {
 public:
  Interrupted(std::shared_ptr<Communicator> inner, Fault fault) : inner_(std::move(inner)), fault_(fault) {}

  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  [[nodiscard]] std::string_view name() const override { return inner_->name(); }
  [[nodiscard]] std::unique_ptr<Stream> make_stream(const std::string& stream) override {
    return inner_->make_stream(stream);
  }
  void all_reduce(const void* send, void* receive, std::int64_t count, DType dtype, Stream& stream,
                  const TransferLabel& label) override {
    count_call();
    inner_->all_reduce(send, receive, count, dtype, stream, label);
  }
  void reduce_scatter(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                      Stream& stream, const TransferLabel& label) override {
    count_call();
    inner_->reduce_scatter(send, receive, counts, dtype, stream, label);
  }
  void all_gather(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                  Stream& stream, const TransferLabel& label) override {
    count_call();
    inner_->all_gather(send, receive, counts, dtype, stream, label);
  }
  void all_to_all(const void* send, std::span<const std::int64_t> send_counts, void* receive,
                  std::span<const std::int64_t> receive_counts, DType dtype, Stream& stream,
                  const TransferLabel& label) override {
    count_call();
    inner_->all_to_all(send, send_counts, receive, receive_counts, dtype, stream, label);
  }
  void send(const void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
            const TransferLabel& label) override {
    inner_->send(data, count, dtype, peer, stream, label);
  }
  void receive(void* data, std::int64_t count, DType dtype, int peer, Stream& stream,
               const TransferLabel& label) override {
    inner_->receive(data, count, dtype, peer, stream, label);
  }
  void barrier(Stream& stream, const TransferLabel& label) override { inner_->barrier(stream, label); }
  std::vector<std::uint64_t> exchange(std::uint64_t value, const TransferLabel& label) override {
    return inner_->exchange(value, label);
  }
  std::vector<std::string> exchange(const std::string& bytes, const TransferLabel& label) override {
    return inner_->exchange(bytes, label);
  }
  [[nodiscard]] std::shared_ptr<Communicator> subgroup(std::span<const int> ranks) override {
    return inner_->subgroup(ranks);
  }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }
  void set_timeout(std::chrono::milliseconds timeout) override { inner_->set_timeout(timeout); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return inner_->timeout(); }

 private:
  void count_call() {
    constexpr int kInTheMiddle = 1;
    if (calls_++ == kInTheMiddle) happen(fault_);
  }

  std::shared_ptr<Communicator> inner_;
  Fault fault_;
  int calls_ = 0;
};

Case three_groups(Op op) {
  Case call;
  call.op = op;
  call.gemm.dtype = DType::kFloat16;
  call.gemm.m = 768;
  call.gemm.n = 512;
  call.gemm.k = 64;
  if (op == Op::kAllToAll) {
    for (int rank = 0; rank < 2; ++rank) {
      auto& rows = call.destinations.emplace_back();
      for (std::int64_t row = 0; row < call.gemm.m; ++row) rows.push_back(static_cast<std::int32_t>(row % 2));
    }
  }
  return call;
}

/// One call. The caller's stream ends without an error when a collective in it was aborted, with anything in
/// the output; the communicator knows, and must be asked before the result is looked at.
void call_and_check(Rank& rank, RankCall& own, const Expected& expected) {
  own.poison();
  own.enqueue(Method::kOverlap);
  rank.stream->synchronize();
  (void)rank.communicator->exchange(std::uint64_t{0}, {.operation = "end of a call"});
  own.check(expected, "overlapped");
}

/// What one rank does. Throws what the fault makes it throw.
void run_rank(Rank& rank, Case call, const Expected& expected, Fault fault, Stage stage) {
  const bool is_victim = rank.rank == kVictim;
  const auto at = [&](Stage now) {
    if (is_victim && stage == now && now != Stage::kGroup) happen(fault);
  };
  at(Stage::kStart);
  if (is_victim && stage == Stage::kGroup) {
    const auto interrupted = std::make_shared<Interrupted>(rank.communicator, fault);
    rank.context = std::make_unique<Context>(interrupted, make_cuda_executor(interrupted, rank.options));
  }
  if (is_victim && fault == Fault::kWrongPlan) call.gemm.n += 8;
  RankCall own(rank, call);
  GPU_EXPECT(own.op().plan().transfers.size() > 1, "one group only: there is no middle to fail in");
  at(Stage::kPlanned);
  for (int i = 0; i < 3; ++i) {
    call_and_check(rank, own, expected);
    at(Stage::kLast);
  }
}

void expect_outcome(const std::vector<std::string>& errors, Fault fault, const std::string& what) {
  const std::string& error = errors[1 - kVictim];
  if (fault == Fault::kSlow) {
    GPU_EXPECT(error.empty() && errors[kVictim].empty(), what << ": " << error << errors[kVictim]);
    return;
  }
  GPU_EXPECT(!error.empty(), what << ": the other rank threw nothing");
  const bool names_victim = error.find("rank " + std::to_string(kVictim)) != std::string::npos;
  const bool names_call = error.find("gemm-") != std::string::npos;
  GPU_EXPECT(names_victim || names_call, what << ": the other rank says: " << error);
}

void run_fault(Op op, Fault fault, Stage stage) {
  const std::string what = std::string(name_of(op)) + ", " + name_of(fault) + " at " + name_of(stage);
  const Case call = three_groups(op);
  constexpr std::int64_t kAnyTile = 128;  // Contiguous rows do not depend on it.
  const Expected expected = expected_of(call, 2, kAnyTile);
  GroupOptions options;
  options.kind = CommunicatorKind::kNccl;
  options.compute_sms = 8;  // Few, so that there are several waves.
  options.timeout = kTimeout;
  Clock::duration took{};
  std::vector<std::string> errors;
  {
    Group group(options);
    const auto started = Clock::now();
    errors = group.run_all(
        [&](Rank& rank) {
          try {
            run_rank(rank, call, expected, fault, stage);
          } catch (const Left&) {
          } catch (const std::exception& error) {
            rank.communicator->abort(error.what());
            throw;
          }
        },
        false);
    took = Clock::now() - started;
  }
  expect_outcome(errors, fault, what);
  const auto allowed = fault == Fault::kSlow ? 60s : kAllowed + (fault == Fault::kStop ? 3s : 0s);
  GPU_EXPECT(took < allowed, what << ": over after "
                                  << std::chrono::duration_cast<std::chrono::milliseconds>(took).count()
                                  << " ms");
}

void fail_at_every_stage(Op op) {
  if (const std::string why = why_no_nccl(2); !why.empty()) throw Skip(why);
  if (ranks_are_processes()) throw Skip("ranks are processes; the faults are made for threads");
  for (const Fault fault : {Fault::kThrow, Fault::kLeave, Fault::kStop, Fault::kSlow, Fault::kOutOfMemory}) {
    for (const Stage stage : {Stage::kStart, Stage::kPlanned, Stage::kGroup, Stage::kLast}) {
      run_fault(op, fault, stage);
    }
  }
  run_fault(op, Fault::kWrongPlan, Stage::kStart);
  // The device and NCCL are as good as new.
  GroupOptions options;
  options.kind = CommunicatorKind::kNccl;
  options.compute_sms = 8;
  Group group(options);
  run_case(group, three_groups(op));
}

}  // namespace

GPU_TEST(nccl_failures_all_reduce) {
  fail_at_every_stage(Op::kAllReduce);
}

GPU_TEST(nccl_failures_reduce_scatter) {
  fail_at_every_stage(Op::kReduceScatter);
}

GPU_TEST(nccl_failures_all_to_all) {
  fail_at_every_stage(Op::kAllToAll);
}

}  // namespace flashoverlap::gpu_test

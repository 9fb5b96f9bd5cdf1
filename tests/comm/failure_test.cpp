#include <array>
#include <chrono>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/ranks.h"
#include "flashoverlap/host_stream.h"
#include "flashoverlap/in_process.h"

namespace flashoverlap::test {
namespace {

using std::chrono::milliseconds;

constexpr DType kType = DType::kFloat32;
// Where the fault must show at once; a test that waits this long fails by its message.
const InProcessOptions kPatient{{}, milliseconds{60'000}};
const InProcessOptions kHasty{{}, milliseconds{400}};

// Counts down when it goes, also with an exception: a stalled rank waits for this, and so stalls as long as
// it takes.
class CountDown {
 public:
  explicit CountDown(std::latch& latch) : latch_(latch) {}
  ~CountDown() { latch_.count_down(); }
  CountDown(const CountDown&) = delete;
  CountDown& operator=(const CountDown&) = delete;

 private:
  std::latch& latch_;
};

// An all-reduce of 4 elements with buffers of its own, and its stream waited for.
void reduce(Communicator& communicator, Stream& stream, const TransferLabel& label, std::int64_t count = 4) {
  std::array<float, 8> values{};
  communicator.all_reduce(values.data(), values.data(), count, kType, stream, label);
  stream.synchronize();
}

TEST(TimeoutTest, NamesTheStalledRankGroupAndTransferAndItsLastCall) {
  std::latch others(2);
  const auto thrown = thrown_by_ranks(3, kHasty, [&](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    reduce(*communicator, *stream, {"gemm-all-reduce m=8", 2, 5});
    if (communicator->rank() == 1) {
      others.wait();
      reduce(*communicator, *stream, {"gemm-all-reduce m=8", 3, 6});
    }
    const CountDown done(others);
    reduce(*communicator, *stream, {"gemm-all-reduce m=8", 3, 6});
  });
  expect_same_error(
      thrown, ErrorKind::kTimeout,
      {": time-out after 0.4",
       " s in all-reduce of 4 f32 (gemm-all-reduce m=8, group 3, transfer 6): rank 1 did not arrive; "
       "its last call was all-reduce of 4 f32 (gemm-all-reduce m=8, group 2, transfer 5)"});
}

TEST(TimeoutTest, FollowsWhoWaitsForWhom) {
  std::latch first(1);
  const auto thrown = thrown_by_ranks(3, kPatient, [&](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    float value = 0;
    if (communicator->rank() == 0) {
      const CountDown done(first);
      communicator->set_timeout(milliseconds{400});
      communicator->receive(&value, 1, kType, 1, *stream, {"zero"});
      stream->synchronize();
    } else if (communicator->rank() == 1) {
      communicator->receive(&value, 1, kType, 2, *stream, {"one"});
      communicator->send(&value, 1, kType, 0, *stream, {"one"});
    } else {
      first.wait();
      communicator->send(&value, 1, kType, 1, *stream, {"two"});
    }
    stream->synchronize();
  });
  expect_same_error(
      thrown, ErrorKind::kTimeout,
      {"rank 0: time-out after 0.4", "in receive of 1 f32 from rank 1 (zero)", "rank 1 did not arrive",
       "its last call was send of 1 f32 to rank 0 (one), which its stream has not reached",
       "it waits in receive of 1 f32 from rank 2 (one), where rank 2 did not arrive; it has made no call"});
}

TEST(TimeoutTest, BlockingExchangeToo) {
  std::latch first(1);
  const auto thrown = thrown_by_ranks(2, kHasty, [&](CommunicatorPointer communicator) {
    if (communicator->rank() == 1) {
      first.wait();
      communicator->exchange(std::uint64_t{1}, {});
    }
    const CountDown done(first);
    communicator->exchange(std::uint64_t{1}, {"agreement"});
  });
  expect_same_error(thrown, ErrorKind::kTimeout,
                    {"exchange of an integer (agreement)", "rank 1 did not arrive"});
}

TEST(TimeoutTest, SubgroupToo) {
  std::latch first(1);
  const auto thrown = thrown_by_ranks(3, kHasty, [&](CommunicatorPointer communicator) {
    if (communicator->rank() == 0) return;
    if (communicator->rank() == 2) {
      first.wait();
      (void)communicator->subgroup(std::array{2, 1});
    }
    const CountDown done(first);
    (void)communicator->subgroup(std::array{2, 1});
  });
  EXPECT_FALSE(thrown[0]);
  expect_error(thrown[1], ErrorKind::kTimeout, {"subgroup of {2, 1}", "rank 2 did not arrive"});
  expect_error(thrown[2], ErrorKind::kTimeout, {thrown[1]->message});
}

TEST(TimeoutTest, ACommunicatorThatFailedStaysSo) {
  std::latch first(1);
  const auto thrown = thrown_by_ranks(2, kHasty, [&](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    if (communicator->rank() == 0) {
      const auto error = thrown_by([&] { reduce(*communicator, *stream, {"first"}); });
      expect_error(error, ErrorKind::kTimeout, {"rank 1 did not arrive; it has made no call"});
      first.count_down();
    } else {
      first.wait();
    }
    communicator->abort("too late to matter");
    reduce(*communicator, *stream, {"second"});
  });
  expect_same_error(thrown, ErrorKind::kTimeout, {"all-reduce of 4 f32 (first)"});
}

// Rank 0 sends rank 1 what takes twice the time-out; rank 2, with nothing to do, waits for them and must not
// give up.
TEST(TimeoutTest, ASlowLinkIsNoStall) {
  run_ranks(3, {{0.001, 0}, milliseconds{400}}, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    constexpr std::int64_t kCount = 200'000;  // 800 kB at 1 MB/s.
    std::vector<float> sent(communicator->rank() == 0 ? kCount : 0, 3.0F);
    std::vector<float> received(communicator->rank() == 1 ? kCount : 0);
    const std::array<std::int64_t, 3> send_counts{0, static_cast<std::int64_t>(sent.size()), 0};
    const std::array<std::int64_t, 3> receive_counts{static_cast<std::int64_t>(received.size()), 0, 0};
    communicator->all_to_all(sent.data(), send_counts, received.data(), receive_counts, kType, *stream, {});
    communicator->barrier(*stream, {});
    stream->synchronize();
    for (const float value : received) ASSERT_EQ(value, 3.0F);
  });
}

TEST(MismatchTest, NamesBothCallsOnEveryRank) {
  using Function = std::function<void(Communicator&, Stream&, float*)>;
  const std::vector<std::int64_t> even{2, 2, 2};
  const std::vector<std::int64_t> other{2, 3, 1};
  struct Case {
    Function call;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases{
      {[](Communicator& c, Stream& s, float* x) { c.all_reduce(x, x, 5, kType, s, {"odd"}); },
       {"all-reduce of 5 f32 (odd)"}},
      {[](Communicator& c, Stream& s, float* x) { c.all_reduce(x, x, 4, DType::kFloat16, s, {"odd"}); },
       {"all-reduce of 4 f16 (odd)"}},
      {[](Communicator& c, Stream& s, float*) { c.barrier(s, {"odd"}); }, {"barrier (odd)"}},
      {[&](Communicator& c, Stream& s, float* x) { c.reduce_scatter(x, x + 32, even, kType, s, {"odd"}); },
       {"reduce-scatter of {2, 2, 2} f32 (odd)"}},
      {[&](Communicator& c, Stream& s, float* x) { c.all_gather(x, x + 32, other, kType, s, {"odd"}); },
       {"all-gather of {2, 3, 1} f32 (odd)"}},
      {[&](Communicator& c, Stream& s, float* x) { c.all_to_all(x, even, x + 32, even, kType, s, {"odd"}); },
       {"all-to-all that sends {2, 2, 2} and receives {2, 2, 2} f32 (odd)"}},
      {[](Communicator& c, Stream&, float*) { c.exchange(std::uint64_t{1}, {"odd"}); },
       {"exchange of an integer (odd)"}},
      {[](Communicator& c, Stream&, float*) { c.exchange("x", {"odd"}); }, {"exchange of bytes (odd)"}},
  };
  for (const Case& one : cases) {
    const auto thrown = thrown_by_ranks(3, kPatient, [&](CommunicatorPointer communicator) {
      const auto stream = communicator->make_stream("stream");
      std::array<float, 64> values{};
      if (communicator->rank() == 2) {
        one.call(*communicator, *stream, values.data());
      } else {
        communicator->all_reduce(values.data(), values.data(), 4, kType, *stream, {"usual", 1, 2});
      }
      stream->synchronize();
    });
    expect_same_error(
        thrown, ErrorKind::kCommunication,
        {"do not match", "rank 2 calls " + one.parts[0], "all-reduce of 4 f32 (usual, group 1, transfer 2)"});
  }
}

TEST(MismatchTest, AllToAllCountsThatDisagree) {
  const auto thrown = thrown_by_ranks(2, kPatient, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    std::array<float, 32> values{};
    const std::array<std::int64_t, 2> sends{1, 3};
    const std::array<std::int64_t, 2> right{1, 1};
    const std::array<std::int64_t, 2> wrong{4, 3};
    communicator->all_to_all(values.data(), sends, values.data() + 8,
                             communicator->rank() == 0 ? right : wrong, kType, *stream, {"routing"});
    stream->synchronize();
  });
  expect_same_error(thrown, ErrorKind::kCommunication,
                    {"rank 0 sends 3 elements to rank 1, which expects 4", "{1, 3}", "{4, 3}", "(routing)"});
}

TEST(MismatchTest, SendAndReceiveOfDifferentCountOrType) {
  for (const bool by_type : {false, true}) {
    const auto thrown = thrown_by_ranks(2, kPatient, [&](CommunicatorPointer communicator) {
      const auto stream = communicator->make_stream("stream");
      std::array<float, 8> values{};
      if (communicator->rank() == 0) communicator->send(values.data(), 3, kType, 1, *stream, {"a", -1, 4});
      if (communicator->rank() == 1) {
        communicator->receive(values.data(), by_type ? 3 : 2, by_type ? DType::kBFloat16 : kType, 0, *stream,
                              {"b"});
      }
      stream->synchronize();
    });
    expect_same_error(
        thrown, ErrorKind::kCommunication,
        {"rank 0 calls send of 3 f32 to rank 1 (a, transfer 4)",
         by_type ? "rank 1 calls receive of 3 bf16 from rank 0 (b)" : "receive of 2 f32 from rank 0 (b)"});
  }
}

TEST(MismatchTest, SubgroupListedInDifferentOrders) {
  const auto thrown = thrown_by_ranks(2, kPatient, [](CommunicatorPointer communicator) {
    const std::array<int, 2> up{0, 1};
    const std::array<int, 2> down{1, 0};
    (void)communicator->subgroup(communicator->rank() == 0 ? up : down);
  });
  expect_same_error(thrown, ErrorKind::kCommunication, {"subgroup of {0, 1}", "subgroup of {1, 0}"});
}

TEST(AbortTest, EndsPendingAndFutureCalls) {
  const auto thrown = thrown_by_ranks(4, kPatient, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    if (communicator->rank() == 3) {
      std::this_thread::sleep_for(milliseconds{20});
      communicator->abort("the disk is full");
      communicator->abort("second reason");
    }
    reduce(*communicator, *stream, {});
  });
  expect_same_error(thrown, ErrorKind::kCommunication, {"rank 3 aborted: the disk is full"});
}

TEST(AbortTest, InASubgroupEndsTheWorldAndTheOtherWayRound) {
  for (const bool from_subgroup : {false, true}) {
    const auto thrown = thrown_by_ranks(4, kPatient, [&](CommunicatorPointer world) {
      const int half = world->rank() / 2 * 2;
      const auto pair = world->subgroup(std::array{half, half + 1});
      const auto stream = world->make_stream("stream");
      if (world->rank() == 3) {
        std::this_thread::sleep_for(milliseconds{20});
        (from_subgroup ? pair : world)->abort("gone");
      } else {
        reduce(world->rank() == 2 ? *pair : *world, *stream, {});
      }
      reduce(*pair, *stream, {});
    });
    expect_same_error(thrown, ErrorKind::kCommunication, {"rank 3 aborted: gone"});
  }
}

TEST(AbortTest, WakesARankThatWaitsForItsLink) {
  const auto thrown =
      thrown_by_ranks(2, {{0, 3600e6}, milliseconds{60'000}}, [](CommunicatorPointer communicator) {
        const auto stream = communicator->make_stream("stream");
        communicator->barrier(*stream, {});
        std::this_thread::sleep_for(milliseconds{20});
        if (communicator->rank() == 0) communicator->abort("enough");
        stream->synchronize();
      });
  expect_same_error(thrown, ErrorKind::kCommunication, {"rank 0 aborted: enough"});
}

TEST(RunRanksTest, ThrowsTheFirstRanksOwnError) {
  for (const bool with_pending_call : {false, true}) {
    expect_error(thrown_by([&] {
                   run_ranks(4, kPatient, [&](CommunicatorPointer communicator) {
                     const auto stream = communicator->make_stream("stream");
                     std::array<float, 4> values{};
                     if (with_pending_call || communicator->rank() != 2) {
                       communicator->all_reduce(values.data(), values.data(), 4, kType, *stream, {});
                     }
                     if (communicator->rank() == 2) throw std::runtime_error("boom");
                     stream->synchronize();
                     reduce(*communicator, *stream, {});
                   });
                 }),
                 ErrorKind::kCommunication, {"rank 2: boom"});
  }
  expect_error(thrown_by([] {
                 run_ranks(2, kPatient, [](CommunicatorPointer communicator) {
                   if (communicator->rank() == 1) throw Error(ErrorKind::kFile, "no such file");
                   communicator->exchange("", {});
                 });
               }),
               ErrorKind::kFile, {"rank 1: no such file"});
}

// Errors that ranks agree on name a rank, which need not be the one that throws first.
TEST(RunRanksTest, AMessageThatNamesItsRankIsLeftAsItIs) {
  const auto message = [](const std::string& text) {
    try {
      run_ranks(3, kPatient, [&](CommunicatorPointer communicator) {
        if (communicator->rank() == 2) throw Error(ErrorKind::kBadArgument, text);
      });
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  for (const char* text : {"rank 0: slice 1 has size -1", "rank 0, tile 3 of wave group 1: injected"}) {
    EXPECT_EQ(message(text), text);
  }
  for (const char* text : {"rank: 0", "rank 0 has 3 rows", "ranks disagree", "rank "}) {
    EXPECT_EQ(message(text), std::string("rank 2: ") + text);
  }
}

TEST(RunRanksTest, ATaskThatThrowsIsTold) {
  expect_error(
      thrown_by([] {
        run_ranks(3, kPatient, [](CommunicatorPointer communicator) {
          const auto stream = communicator->make_stream("stream");
          if (communicator->rank() == 1) {
            dynamic_cast<HostStream&>(*stream).enqueue([] { throw std::runtime_error("tile 7 is bad"); });
          }
          reduce(*communicator, *stream, {});
        });
      }),
      ErrorKind::kCommunication, {"rank 1: tile 7 is bad"});
}

TEST(RunRanksTest, ARankThatReturnsEarlyIsNamed) {
  expect_error(thrown_by([] {
                 run_ranks(3, kPatient, [](CommunicatorPointer communicator) {
                   const auto stream = communicator->make_stream("stream");
                   reduce(*communicator, *stream, {"first"});
                   if (communicator->rank() == 1) return;
                   reduce(*communicator, *stream, {"second"});
                 });
               }),
               ErrorKind::kCommunication,
               {"cannot complete all-reduce of 4 f32 (second)", "rank 1 did not arrive; it has finished",
                "its last call was all-reduce of 4 f32 (first)"});
}

TEST(RunRanksTest, ADroppedCallIsNamed) {
  expect_error(
      thrown_by([] {
        run_ranks(2, kPatient, [](CommunicatorPointer communicator) {
          std::array<float, 4> values{};
          const auto stream = communicator->make_stream("stream");
          if (communicator->rank() == 1) {
            dynamic_cast<HostStream&>(*stream).enqueue([] { std::this_thread::sleep_for(milliseconds{20}); });
          }
          communicator->all_reduce(values.data(), values.data(), 4, kType, *stream, {"lost"});
          if (communicator->rank() == 0) stream->synchronize();
        });
      }),
      ErrorKind::kCommunication, {"rank 1 did not arrive: its stream dropped the call"});
}

// Buffers of a rank that leaves with an error are freed at once: nobody may touch them any more
// (AddressSanitizer sees it).
TEST(AbortTest, BuffersMayBeFreedAfterTheError) {
  for (int round = 0; round < 10; ++round) {
    (void)thrown_by_ranks(4, kPatient, [&](CommunicatorPointer communicator) {
      const auto stream = communicator->make_stream("stream");
      for (int call = 0; call < 20; ++call) {
        std::vector<float> values(100'000, 1.0F);
        communicator->all_reduce(values.data(), values.data(), 100'000, kType, *stream, {});
        if (call == 5 && communicator->rank() == round % 4) communicator->abort("now");
        stream->synchronize();
      }
      FAIL() << "the abort was not seen";
    });
  }
}

}  // namespace
}  // namespace flashoverlap::test

#include <array>
#include <cstdlib>
#include <limits>
#include <string>

#include "comm/ranks.h"
#include "flashoverlap/in_process.h"

namespace flashoverlap::test {
namespace {

constexpr DType kType = DType::kFloat32;

class OtherStream final : public Stream {
 public:
  void synchronize() override {}
};

class ArgumentsTest : public ::testing::Test {
 protected:
  CommunicatorPointer communicator_ = make_in_process_communicators(3)[1];
  std::unique_ptr<Stream> stream_ = communicator_->make_stream("stream");
  std::array<float, 64> values_{};
  std::array<std::int64_t, 3> even_{4, 4, 4};

  void expect_bad(const std::function<void()>& function, const std::vector<std::string>& parts) {
    expect_error(thrown_by(function), ErrorKind::kBadArgument, parts);
  }
};

TEST_F(ArgumentsTest, Counts) {
  float* const x = values_.data();
  expect_bad([&] { communicator_->all_reduce(x, x, -1, kType, *stream_, {"op"}); },
             {"all-reduce of -1 f32 (op)", "count -1 is negative"});
  expect_bad(
      [&] {
        communicator_->reduce_scatter(x, x, std::array<std::int64_t, 2>{1, 1}, kType, *stream_, {});
      },
      {"reduce-scatter of {1, 1} f32", "2 counts were given", "one per rank is expected: 3"});
  expect_bad([&] { communicator_->all_gather(x, x, std::array<std::int64_t, 4>{}, kType, *stream_, {}); },
             {"4 counts were given", "expected: 3"});
  expect_bad(
      [&] {
        communicator_->all_gather(x, x, std::array<std::int64_t, 3>{1, -7, 1}, kType, *stream_, {});
      },
      {"count -7 is negative"});
  expect_bad(
      [&] {
        communicator_->all_to_all(x, even_, x + 32, std::array<std::int64_t, 1>{1}, kType, *stream_, {});
      },
      {"1 counts were given"});
  expect_bad([&] { communicator_->send(x, -2, kType, 0, *stream_, {}); },
             {"send of -2 f32 to rank 0", "negative"});
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max() / 4;
  expect_bad(
      [&] {
        communicator_->all_gather(x, x, std::array{huge, huge, huge}, kType, *stream_, {});
      },
      {"do not fit into"});
}

TEST_F(ArgumentsTest, Buffers) {
  float* const x = values_.data();
  expect_bad([&] { communicator_->all_reduce(nullptr, x, 4, kType, *stream_, {}); },
             {"the send buffer is null, but 4 elements are expected"});
  expect_bad([&] { communicator_->all_gather(x, nullptr, even_, kType, *stream_, {}); },
             {"the receive buffer is null, but 12 elements"});
  expect_bad([&] { communicator_->receive(nullptr, 1, kType, 0, *stream_, {}); }, {"receive buffer is null"});
  expect_bad([&] { communicator_->send(nullptr, 1, kType, 0, *stream_, {}); }, {"send buffer is null"});
  expect_bad([&] { communicator_->send(reinterpret_cast<char*>(x) + 2, 1, kType, 0, *stream_, {}); },
             {"is not aligned to the 4 bytes of an element"});
  expect_bad([&] { communicator_->all_reduce(x, x + 1, 4, kType, *stream_, {}); },
             {"the send buffer (16 bytes", "the receive buffer (16 bytes", "overlap"});
  expect_bad([&] { communicator_->reduce_scatter(x, x, even_, kType, *stream_, {}); }, {"overlap"});
  expect_bad([&] { communicator_->reduce_scatter(x, x + 8, even_, kType, *stream_, {}); }, {"overlap"});
  expect_bad([&] { communicator_->all_gather(x, x, even_, kType, *stream_, {}); }, {"overlap"});
  expect_bad([&] { communicator_->all_to_all(x, even_, x, even_, kType, *stream_, {}); },
             {"overlap", "must be apart"});
}

TEST_F(ArgumentsTest, PeersStreamsAndTimeouts) {
  float* const x = values_.data();
  expect_bad([&] { communicator_->send(x, 1, kType, 3, *stream_, {}); },
             {"send: peer 3 is out of range; ranks are 0 to 2"});
  expect_bad([&] { communicator_->receive(x, 1, kType, -1, *stream_, {}); }, {"receive: peer -1"});
  OtherStream other;
  expect_bad([&] { communicator_->barrier(other, {"op"}); }, {"barrier (op)", "not a HostStream"});
  expect_bad([&] { communicator_->set_timeout(std::chrono::milliseconds{0}); }, {"time-out 0 ms"});
  communicator_->set_timeout(std::chrono::milliseconds::max());
}

TEST_F(ArgumentsTest, Subgroups) {
  expect_bad([&] { (void)communicator_->subgroup({}); }, {"the list of ranks is empty"});
  expect_bad(
      [&] {
        (void)communicator_->subgroup(std::array{1, 3});
      },
      {"subgroup of {1, 3}: ranks are 0 to 2"});
  expect_bad(
      [&] {
        (void)communicator_->subgroup(std::array{1, 1});
      },
      {"subgroup of {1, 1}: a rank is listed twice"});
  expect_bad(
      [&] {
        (void)communicator_->subgroup(std::array{0, 2});
      },
      {"rank 1, which calls it, is not listed"});
}

TEST_F(ArgumentsTest, Options) {
  expect_bad([] { (void)make_in_process_communicators(0); }, {"world size 0: at least 1 is expected"});
  for (const double value :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    expect_bad([&] { (void)make_in_process_communicators(1, {{value, 0}, {}}); }, {"link bandwidth in GB/s"});
    expect_bad([&] { (void)make_in_process_communicators(1, {{0, value}, {}}); }, {"link latency in us"});
  }
  expect_bad(
      [] {
        (void)make_in_process_communicators(1, {{}, std::chrono::milliseconds{-5}});
      },
      {"time-out -5 ms"});
  expect_bad([] { run_ranks(1, {}, {}); }, {"run_ranks: the function is empty"});
}

TEST_F(ArgumentsTest, TimeoutFromTheEnvironment) {
  ::setenv("FLASHOVERLAP_TIMEOUT_MS", "1234", 1);
  EXPECT_EQ(make_in_process_communicators(1)[0]->timeout().count(), 1234);
  EXPECT_EQ(make_in_process_communicators(1, {{}, std::chrono::milliseconds{77}})[0]->timeout().count(), 77);
  ::setenv("FLASHOVERLAP_TIMEOUT_MS", "", 1);
  EXPECT_EQ(make_in_process_communicators(1)[0]->timeout().count(), 60'000);
  for (const char* value : {"0", "-1", "1e3", " 4 ", "4abc", "99999999999999999999"}) {
    ::setenv("FLASHOVERLAP_TIMEOUT_MS", value, 1);
    expect_bad([] { (void)make_in_process_communicators(1); },
               {"FLASHOVERLAP_TIMEOUT_MS", std::string("'") + value + "'", "an integer from 1"});
  }
  ::unsetenv("FLASHOVERLAP_TIMEOUT_MS");
}

// A call that is refused counts as not made: the next ones still match.
TEST_F(ArgumentsTest, ARefusedCallTakesNoNumber) {
  run_ranks(2, {}, [](CommunicatorPointer communicator) {
    const auto stream = communicator->make_stream("stream");
    float value = 1;
    if (communicator->rank() == 1) {
      EXPECT_THROW(communicator->all_reduce(nullptr, &value, 1, kType, *stream, {}), Error);
    }
    communicator->all_reduce(&value, &value, 1, kType, *stream, {});
    stream->synchronize();
    EXPECT_EQ(value, 2);
  });
}

}  // namespace
}  // namespace flashoverlap::test

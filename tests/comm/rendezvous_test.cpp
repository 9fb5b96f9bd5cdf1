#include "flashoverlap/rendezvous.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/tcp/server.h"
#include "comm/tcp/socket.h"
#include "ops/agree.h"
#include "support/seed.h"

namespace flashoverlap {
namespace {

using comm::tcp::Clock;
using comm::tcp::Frame;
using comm::tcp::FrameKind;
using comm::tcp::Socket;

int free_port() {
  return Socket::listen_at(0).local_port();
}

Launch launch_of(int rank, int world_size, int port) {
  Launch launch;
  launch.rank = rank;
  launch.world_size = world_size;
  launch.rendezvous = "localhost:" + std::to_string(port);
  launch.launcher = "test";
  return launch;
}

/// Runs `body` as each of the ranks listed, on threads; returns what each threw, empty where nothing.
std::vector<std::string> run(int world_size, const std::vector<int>& ranks, std::chrono::milliseconds timeout,
                             const std::function<void(Communicator&)>& body) {
  const int port = free_port();
  std::vector<std::string> errors(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (const int rank : ranks) {
    threads.emplace_back([&, rank] {
      try {
        const auto communicator =
            make_rendezvous_communicator(launch_of(rank, world_size, port), {.timeout = timeout});
        body(*communicator);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks;
  for (int r = 0; r < world_size; ++r) ranks.push_back(r);
  return ranks;
}

constexpr std::chrono::milliseconds kLong{20'000};

void expect_no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

class Rendezvous : public test::SeededTest {};

std::string text_of(int rank, int round) {
  return std::string(static_cast<std::size_t>((rank * 7919 + round * 104'729) % 5000),
                     static_cast<char>('a' + rank));
}

TEST_F(Rendezvous, EverybodyGetsWhatEachRankGave) {
  for (const int world : {1, 2, 3, 8}) {
    expect_no_errors(run(world, all_ranks(world), kLong, [&](Communicator& communicator) {
      EXPECT_EQ(communicator.size(), world);
      for (int round = 0; round < 20; ++round) {
        const auto texts = communicator.exchange(text_of(communicator.rank(), round), {.operation = "texts"});
        const auto numbers = communicator.exchange(
            static_cast<std::uint64_t>(communicator.rank() * 1000 + round), {.operation = "numbers"});
        ASSERT_EQ(std::ssize(texts), world);
        for (int r = 0; r < world; ++r) {
          EXPECT_EQ(texts[static_cast<std::size_t>(r)], text_of(r, round));
          EXPECT_EQ(numbers[static_cast<std::size_t>(r)], static_cast<std::uint64_t>(r * 1000 + round));
        }
      }
    }));
  }
}

TEST_F(Rendezvous, LargeTextsPass) {
  const std::string large(std::size_t{5} << 20U, 'x');
  expect_no_errors(run(3, all_ranks(3), kLong, [&](Communicator& communicator) {
    for (const std::string& text : communicator.exchange(large, {.operation = "large"}))
      EXPECT_EQ(text, large);
  }));
}

TEST_F(Rendezvous, SubgroupsExchangeAmongThemselvesInTheirOrder) {
  expect_no_errors(run(4, all_ranks(4), kLong, [&](Communicator& communicator) {
    if (communicator.rank() == 0) return;  // Not even rank 0, which serves, need take part, or stay.
    const std::array listed{3, 1, 2};
    for (int repeat = 0; repeat < 2; ++repeat) {  // Twice the same list: two groups.
      const auto group = communicator.subgroup(listed);
      EXPECT_EQ(listed[static_cast<std::size_t>(group->rank())], communicator.rank());
      const auto values =
          group->exchange(static_cast<std::uint64_t>(communicator.rank()), {.operation = "x"});
      EXPECT_EQ(values, (std::vector<std::uint64_t>{3, 1, 2}));
    }
  }));
}

TEST_F(Rendezvous, ARankThatDoesNotConnectIsNamed) {
  const auto errors = run(3, {0, 1}, std::chrono::milliseconds(400), [](Communicator&) {});
  EXPECT_NE(errors[0].find("rank 2 of 3 did not connect within 400 ms"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1], "");
}

TEST_F(Rendezvous, NobodyAtTheAddress) {
  const auto errors = run(2, {1}, std::chrono::milliseconds(200), [](Communicator&) {});
  EXPECT_NE(errors[1].find("rank 1 of 2 found nobody at localhost:"), std::string::npos) << errors[1];
}

TEST_F(Rendezvous, ARankThatDoesNotComeToAnExchangeIsNamedToAllOthers) {
  const auto errors = run(3, all_ranks(3), kLong, [](Communicator& communicator) {
    communicator.set_timeout(std::chrono::milliseconds(300));
    if (communicator.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(900));
      return;
    }
    (void)communicator.exchange(std::uint64_t{0}, {.operation = "agreement"});
  });
  for (const std::size_t r : {0U, 2U}) {
    EXPECT_NE(errors[r].find("rank 1 did not come to 'agreement' within 300 ms"), std::string::npos)
        << errors[r];
  }
}

TEST_F(Rendezvous, ARankThatDiesFailsTheOthers) {
  const auto errors = run(3, all_ranks(3), kLong, [](Communicator& communicator) {
    if (communicator.rank() == 2) return;
    (void)communicator.exchange(std::uint64_t{0}, {.operation = "agreement"});
  });
  for (const std::size_t r : {0U, 1U}) EXPECT_NE(errors[r].find("rank 2"), std::string::npos) << errors[r];
}

TEST_F(Rendezvous, AnAbortReachesEveryRankAndStays) {
  const auto errors = run(3, all_ranks(3), kLong, [](Communicator& communicator) {
    if (communicator.rank() == 1) {
      communicator.abort("no memory");
      communicator.abort("a second reason");
    }
    try {
      (void)communicator.exchange(std::uint64_t{0}, {.operation = "agreement"});
    } catch (const Error&) {
    }
    (void)communicator.exchange(std::uint64_t{0}, {.operation = "later"});
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("rank 1 aborted: no memory"), std::string::npos) << error;
  }
}

TEST_F(Rendezvous, ExchangesThatDoNotMatch) {
  const auto errors = run(2, all_ranks(2), kLong, [](Communicator& communicator) {
    (void)communicator.exchange(std::uint64_t{0},
                                {.operation = communicator.rank() == 0 ? "this call" : "that call"});
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("do not match"), std::string::npos) << error;
    EXPECT_NE(error.find("this call"), std::string::npos) << error;
    EXPECT_NE(error.find("that call"), std::string::npos) << error;
  }
}

TEST_F(Rendezvous, RanksOfOneCallMayHaveShapesOfTheirOwn) {
  const auto errors = run(3, all_ranks(3), kLong, [](Communicator& communicator) {
    const std::string label = ops::with_shape("gemm-all-to-all", 100 + communicator.rank(), 64, 32);
    const auto values =
        communicator.exchange(static_cast<std::uint64_t>(communicator.rank()), {.operation = label});
    EXPECT_EQ(values, (std::vector<std::uint64_t>{0, 1, 2}));
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST_F(Rendezvous, StrangersAtThePortAreSentAway) {
  const int port = free_port();
  std::thread rank_0([&] {
    const auto communicator = make_rendezvous_communicator(launch_of(0, 2, port), {.timeout = kLong});
    EXPECT_EQ(communicator->exchange(std::uint64_t{5}, {.operation = "x"}),
              (std::vector<std::uint64_t>{5, 6}));
  });
  {
    // One says nothing and goes, one talks another protocol.
    const Socket silent = Socket::connect_by("localhost", port, Clock::now() + kLong);
    ASSERT_TRUE(silent.is_open());
  }
  {
    const Socket chatty = Socket::connect_by("localhost", port, Clock::now() + kLong);
    ASSERT_TRUE(chatty.is_open());
    EXPECT_TRUE(chatty.send({.kind = FrameKind::kExchange, .bytes = "GET / HTTP/1.1"}, Clock::now() + kLong));
  }
  const auto communicator = make_rendezvous_communicator(launch_of(1, 2, port), {.timeout = kLong});
  EXPECT_EQ(communicator->exchange(std::uint64_t{6}, {.operation = "x"}), (std::vector<std::uint64_t>{5, 6}));
  rank_0.join();
}

TEST_F(Rendezvous, AnotherWorldSizeIsRefusedOnBothSides) {
  const int port = free_port();
  std::string error_0;
  std::thread rank_0([&] {
    try {
      (void)make_rendezvous_communicator(launch_of(0, 2, port), {.timeout = kLong});
    } catch (const Error& error) {
      error_0 = error.what();
    }
  });
  try {
    (void)make_rendezvous_communicator(launch_of(1, 3, port), {.timeout = kLong});
    ADD_FAILURE() << "no error on rank 1";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 of 3 wants to join a world of 2"), std::string::npos)
        << error.what();
  }
  rank_0.join();
  EXPECT_NE(error_0.find("rank 1 of 3 wants to join a world of 2"), std::string::npos) << error_0;
}

TEST_F(Rendezvous, BadLaunches) {
  const auto message = [](const Launch& launch) -> std::string {
    try {
      (void)make_rendezvous_communicator(launch, {.timeout = std::chrono::milliseconds(200)});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadArgument);
      return error.what();
    }
    return {};
  };
  Launch launch = launch_of(1, 2, 1);
  launch.rendezvous = "";
  launch.launcher = "SLURM";
  EXPECT_NE(message(launch).find("SLURM does not say where"), std::string::npos);
  for (const char* text :
       {"localhost", "localhost:", ":123", "localhost:0", "localhost:70000", "localhost:1x"}) {
    launch.rendezvous = text;
    EXPECT_NE(message(launch).find(text), std::string::npos) << text;
  }
  launch.rank = 2;
  EXPECT_NE(message(launch).find("rank 2 of 2"), std::string::npos);
}

TEST_F(Rendezvous, StreamsAreRefused) {
  expect_no_errors(run(1, {0}, kLong, [](Communicator& communicator) {
    EXPECT_THROW((void)communicator.make_stream("x"), Error);
  }));
}

TEST_F(Rendezvous, BrokenMessagesAreErrorsAndNothingElse) {
  comm::tcp::Request request{.ranks = {0, 1, 2},
                             .instance = 3,
                             .number = 4,
                             .timeout_ms = 5,
                             .label = "label",
                             .bytes = std::string(20, 'b')};
  const Frame whole = encode(request);
  EXPECT_EQ(comm::tcp::decode_request(whole).bytes, request.bytes);
  for (int i = 0; i < 2000; ++i) {
    Frame broken = whole;
    if (i % 2 == 0) {
      broken.bytes.resize(static_cast<std::size_t>(pick(0, std::ssize(whole.bytes) - 1)));
    } else {
      for (int change = 0; change < 3; ++change) {
        broken.bytes[static_cast<std::size_t>(pick(0, std::ssize(whole.bytes) - 1))] =
            static_cast<char>(pick(-128, 127));
      }
    }
    try {
      (void)comm::tcp::decode_request(broken);
      (void)comm::tcp::decode_reply(broken);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCommunication);
    }
  }
}

}  // namespace
}  // namespace flashoverlap

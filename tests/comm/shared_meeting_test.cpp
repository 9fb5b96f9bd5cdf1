#include "comm/shared_meeting.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/tcp/socket.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/rendezvous.h"
#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap::comm {
namespace {

constexpr std::chrono::milliseconds kLong{20'000};
constexpr std::chrono::milliseconds kHasty{300};

class SharedMeetingTest : public test::SeededTest {};

/// Runs `body` as every rank, on threads; returns what each threw, empty where nothing.
std::vector<std::string> run(int world, std::int64_t slot_bytes, std::chrono::milliseconds timeout,
                             const std::function<void(SharedMeeting&)>& body) {
  const auto controls = make_in_process_communicators(world);
  std::vector<std::string> errors(static_cast<std::size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const auto index = static_cast<std::size_t>(rank);
      try {
        SharedMeeting meeting(*controls[index], slot_bytes, timeout);
        body(meeting);
      } catch (const Error& error) {
        errors[index] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

std::string nothing() {
  return "a test";
}

TEST_F(SharedMeetingTest, EverybodyReadsWhatEachWrote) {
  for (const int world : {1, 2, 3, 8}) {
    const std::int64_t slot_bytes = pick(1, 5000);
    const auto value_of = [&](int rank, int round) { return static_cast<unsigned char>(rank * 31 + round); };
    const auto errors = run(world, slot_bytes, kLong, [&](SharedMeeting& meeting) {
      ASSERT_EQ(meeting.size(), world);
      std::vector<unsigned char> expected(static_cast<std::size_t>(slot_bytes));
      for (int round = 0; round < 40; ++round) {
        std::memset(meeting.slot(meeting.rank()), value_of(meeting.rank(), round), expected.size());
        meeting.meet(nothing);
        for (int r = 0; r < world; ++r) {
          std::ranges::fill(expected, value_of(r, round));
          ASSERT_EQ(std::memcmp(meeting.slot(r), expected.data(), expected.size()), 0);
        }
        meeting.meet(nothing);
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

TEST_F(SharedMeetingTest, TheMemoryHasNoNameOnceAllHaveIt) {
  const std::string mark = fmt::format("flashoverlap-{}-", getpid());
  const auto errors = run(3, 64, kLong, [&](SharedMeeting& meeting) {
    meeting.meet(nothing);
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
      EXPECT_EQ(entry.path().filename().string().find(mark), std::string::npos);
    meeting.meet(nothing);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST_F(SharedMeetingTest, WhoDoesNotComeIsNamed) {
  const auto errors = run(3, 64, kHasty, [](SharedMeeting& meeting) {
    if (meeting.rank() == 1) {
      while (true) {  // until another has given up
        meeting.throw_if_failed();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    meeting.meet([] { return "all-reduce for something"; });
  });
  EXPECT_NE(errors[0].find("all-reduce for something on rank "), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("of 3: rank 1 did not come within 300 ms"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(errors[2], errors[0]);
}

TEST_F(SharedMeetingTest, RanksThatGiveUpAtTheSameMomentSayTheSame) {
  for (int round = 0; round < 40; ++round) {
    const auto errors = run(9, 64, std::chrono::milliseconds(3), [](SharedMeeting& meeting) {
      if (meeting.rank() == 0) {
        while (true) meeting.throw_if_failed();
      }
      meeting.meet([&] { return "reason " + std::to_string(meeting.rank()) + std::string(900, '.'); });
    });
    for (const std::string& error : errors) {
      EXPECT_EQ(error.find("reason "), 0U) << error;
      EXPECT_EQ(error, errors[0]);
    }
  }
}

TEST_F(SharedMeetingTest, AFailureReachesAllAndTheFirstReasonStays) {
  const std::string reason = "rank 2 has no memory left" + std::string(5000, '.');
  const auto errors = run(4, 64, kLong, [&](SharedMeeting& meeting) {
    if (meeting.rank() == 2) {
      meeting.fail(ErrorKind::kOutOfMemory, reason);
      meeting.fail(ErrorKind::kInternal, "too late to matter");
    }
    meeting.meet(nothing);
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error.find("rank 2 has no memory left..."), 0U) << error;
    EXPECT_LT(error.size(), 1000U);
  }
}

TEST_F(SharedMeetingTest, WhoEndsItsPartIsNamed) {
  const auto errors = run(2, 64, kLong, [](SharedMeeting& meeting) {
    if (meeting.rank() == 0) meeting.meet([] { return "barrier"; });
  });
  EXPECT_EQ(errors[0], "barrier on rank 0 of 2: rank 1 has ended its part");
  EXPECT_EQ(errors[1], "");
}

TEST_F(SharedMeetingTest, EndingAfterTheLastMeetingIsNoFailure) {
  const auto errors = run(2, 64, kLong, [](SharedMeeting& meeting) {
    meeting.meet(nothing);
    if (meeting.rank() == 1) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (int i = 0; i < 3; ++i) {
      meeting.throw_if_failed();
      std::this_thread::sleep_for(std::chrono::milliseconds(25));
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

Launch launch_of(int rank, int port) {
  Launch launch;
  launch.rank = rank;
  launch.world_size = 2;
  launch.rendezvous = "localhost:" + std::to_string(port);
  launch.launcher = "test";
  return launch;
}

/// A child process that is rank 1 of 2, does `body` and ends at once, without a destructor.
pid_t start_rank_1(int port, const std::function<void(SharedMeeting&)>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  try {
    const auto control = make_rendezvous_communicator(launch_of(1, port));
    SharedMeeting meeting(*control, 64, kLong);
    body(meeting);
    _exit(0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank 1: %s\n", error.what());
  }
  _exit(1);
}

TEST_F(SharedMeetingTest, ProcessesMeetAndOneThatEndsWithoutAWordIsNamed) {
  const int port = tcp::Socket::listen_at(0).local_port();
  const pid_t child = start_rank_1(port, [](SharedMeeting& meeting) {
    for (int round = 0; round < 50; ++round) {
      *meeting.slot(1) = static_cast<std::byte>(round);
      meeting.meet(nothing);
      if (*meeting.slot(0) != static_cast<std::byte>(100 + round)) _exit(2);
      meeting.meet(nothing);
    }
  });
  ASSERT_GT(child, 0);
  const auto control = make_rendezvous_communicator(launch_of(0, port));
  SharedMeeting meeting(*control, 64, kLong);
  for (int round = 0; round < 50; ++round) {
    *meeting.slot(0) = static_cast<std::byte>(100 + round);
    meeting.meet(nothing);
    EXPECT_EQ(*meeting.slot(1), static_cast<std::byte>(round));
    meeting.meet(nothing);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kCommunication,
                            fmt::format("rank 1 (process {}) ended without a word", child),
                            meeting.meet(nothing));
}

TEST_F(SharedMeetingTest, RanksOfSeveralHostsAreRefused) {
  require_one_host({"a", "a", "a"});
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kUnsupported, "ranks 0 and 2 are on different hosts",
                            require_one_host({"a", "a", "b"}));
}

}  // namespace
}  // namespace flashoverlap::comm

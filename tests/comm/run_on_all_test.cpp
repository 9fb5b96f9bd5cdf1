#include "comm/run_on_all.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

#include "core/fail.h"
#include "flashoverlap/in_process.h"
#include "support/throws.h"

namespace flashoverlap::comm {
namespace {

/// Runs `step` as each of 3 ranks, which must throw Error(kind) with `part` on every rank.
void expect_on_all(ErrorKind kind, const std::string& part, const std::function<void(int)>& step) {
  std::vector<std::thread> threads;
  for (const auto& control : make_in_process_communicators(3)) {
    threads.emplace_back([&, control] {
      FLASHOVERLAP_EXPECT_THROW(kind, part, run_on_all(*control, "a test", [&] { step(control->rank()); }));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RunOnAll, NothingIsThrownWhereAllCan) {
  std::vector<std::thread> threads;
  for (const auto& control : make_in_process_communicators(3)) {
    threads.emplace_back([control] {
      for (int i = 0; i < 5; ++i) run_on_all(*control, "a test", [] {});
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RunOnAll, TheFirstRanksErrorIsThrownOnAllWithItsKind) {
  expect_on_all(ErrorKind::kDevice, "a test: rank 1 cannot take part: device 7 is not there", [](int rank) {
    if (rank == 1) core::fail(ErrorKind::kDevice, "device {} is not there", 7);
    if (rank == 2) core::fail(ErrorKind::kTimeout, "too late");
  });
}

TEST(RunOnAll, OtherExceptionsAreErrorsToo) {
  expect_on_all(ErrorKind::kInternal, "a test: rank 0 cannot take part: what was that", [](int rank) {
    if (rank == 0) throw std::runtime_error("what was that");
  });
}

}  // namespace
}  // namespace flashoverlap::comm

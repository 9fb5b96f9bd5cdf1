#include "mpi/run_ranks_over_mpi.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "core/fail.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/mpi.h"

namespace flashoverlap {
namespace test {
namespace {

std::shared_ptr<Communicator> g_job;

std::shared_ptr<Communicator> group_of_first(int world_size) {
  const std::shared_ptr<Communicator> all = job();
  if (world_size > all->size()) return nullptr;
  std::vector<int> ranks(static_cast<std::size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return all->rank() < world_size ? all->subgroup(ranks) : nullptr;
}

}  // namespace

std::shared_ptr<Communicator> job() {
  if (!g_job) g_job = make_mpi_communicator();
  return g_job;
}

}  // namespace test

// In place of the library's: threads become processes.
void run_ranks(int world_size, const InProcessOptions& /*options*/,
               const std::function<void(std::shared_ptr<Communicator>)>& function) {
  if (world_size > test::job()->size()) {
    GTEST_SKIP() << world_size << " ranks are needed, this job has " << test::job()->size();
  }
  try {
    const auto group = test::group_of_first(world_size);
    if (group) function(group);
    // Nobody runs ahead into the next test, whose ranks may be others.
    test::job()->exchange(std::uint64_t{0}, {.operation = "end of a test"});
  } catch (const Error& error) {
    test::g_job = nullptr;
    throw Error(error.kind(), error.what());
  }
}

}  // namespace flashoverlap

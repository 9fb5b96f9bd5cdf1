#include <gtest/gtest.h>

#include "flashoverlap/error.h"
#include "mpi/run_ranks_over_mpi.h"

// As gtest_main, for a process of an MPI job: rank 0 prints everything, the others only what fails.
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  try {
    if (flashoverlap::test::job()->rank() != 0) {
      auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
      GTEST_FLAG_SET(brief, true);
      static_cast<void>(listeners);
    }
  } catch (const flashoverlap::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return RUN_ALL_TESTS();
}

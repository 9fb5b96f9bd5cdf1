#pragma once

#include <memory>

#include "flashoverlap/communicator.h"

/// Behaviour suites are written against run_ranks. A test program that is linked with run_ranks_over_mpi.cpp
/// has the same function over MPI: every process runs every test, and the first `world_size` processes are
/// its ranks.
namespace flashoverlap::test {

/// The communicator of all processes of this job. Made anew after a failure.
std::shared_ptr<Communicator> job();

}  // namespace flashoverlap::test

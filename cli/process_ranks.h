#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "flashoverlap/communicator.h"

/// Ranks that are processes of an MPI job instead of threads of this one.
namespace flashoverlap::cli {

/// True when an MPI launcher (mpirun, or srun with MPI) started this process as one of several. Throws
/// Error(kBadArgument) for an environment that contradicts itself.
bool is_job();

/// Processes of the job; 1 without one.
std::int64_t job_size();

/// Only the first rank prints, and it alone says what is wrong with a command line.
bool is_first_rank();

/// The communicator of all processes of the job, made once. Throws Error(kUnsupported) when this program was
/// built without MPI, Error(kBadArgument) naming --ranks when `ranks` is not the size of the job.
std::shared_ptr<Communicator> job_communicator(std::int64_t ranks);

/// Everybody's `values`, by rank. Every rank must pass equally many.
std::vector<std::vector<double>> gather(Communicator& communicator, std::span<const double> values);

/// Replaces this process by mpirun, which starts `processes` of this program with the same command line but
/// for
/// --processes. Throws Error(kUnsupported) that says what to install when that cannot be.
[[noreturn]] void start_processes(std::int64_t processes);

}  // namespace flashoverlap::cli

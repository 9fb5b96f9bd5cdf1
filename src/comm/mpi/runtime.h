#pragma once

#include <mpi.h>

#include <chrono>
#include <functional>
#include <string>

namespace flashoverlap::comm::mpi {

/// Makes sure that MPI is initialised with MPI_THREAD_MULTIPLE, by this library when nobody has done it yet;
/// then this library also finalises it, at the end of the process. Throws Error(kUnsupported) when MPI
/// offers, or was initialised with, less, and Error(kBadArgument) after MPI_Finalize.
///
/// Whoever finalises MPI, this library first lets all ranks come to a good end. After a failure MPI_Finalize
/// might wait for a dead rank for ever; so the process is ended by MPI_Abort(MPI_COMM_WORLD, 1) instead, once
/// the other ranks have had up to 4 s to throw the error too.
void require_mpi(std::chrono::milliseconds patience);

/// Calls `function`, which blocks in MPI, on a thread of its own and waits for it at most `timeout`; then
/// throws Error(kTimeout) that says "time-out in <what>", and the thread stays behind. Errors are thrown
/// here.
void call_with_timeout(std::chrono::milliseconds timeout, const std::string& what,
                       std::function<void()> function);

}  // namespace flashoverlap::comm::mpi

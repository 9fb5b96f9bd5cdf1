#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "flashoverlap/communicator.h"

namespace flashoverlap {

struct MpiOptions {
  /// As Communicator::timeout. FLASHOVERLAP_TIMEOUT_MS replaces the default.
  std::chrono::milliseconds timeout{60'000};
  /// Address of the MPI_Comm whose ranks take part, in its order; null: MPI_COMM_WORLD. It is duplicated,
  /// never used.
  const void* communicator = nullptr;
};

/// A communicator between the processes of an MPI job. Collective over the MPI communicator's ranks.
///
/// MPI is initialised when nobody has done it yet, with MPI_THREAD_MULTIPLE, and then finalised at the end of
/// the process. SIGPIPE is ignored from then on where the program has set nothing else, because MPI would let
/// a dead rank end others with it. Streams are HostStreams; their threads poll with growing sleeps, so that
/// waiting costs little processor time. Results are bitwise repeatable, independent of how data is cut into
/// calls, and equal to the in-process communicator's: sums in rank order in float32. Several streams may be
/// used at the same time.
///
/// After an error of kind kCommunication or kTimeout the process should end: communicators that are made
/// later work only where all ranks still live, and MPI_Finalize is replaced by MPI_Abort(MPI_COMM_WORLD, 1)
/// where a rank is lost, because it would wait for it. Buffers of calls that were in flight to a lost rank
/// should stay allocated until then. See docs/operations.md, also for the options of mpirun that let
/// surviving ranks report.
///
/// Throws Error(kUnsupported) when this library was built without MPI or when MPI offers fewer threads,
/// Error(kBadArgument) after MPI_Finalize, Error(kTimeout) when not all ranks make the call.
[[nodiscard]] std::shared_ptr<Communicator> make_mpi_communicator(const MpiOptions& options = {});

/// Name and version of the MPI library, for reports; empty when this library was built without MPI.
[[nodiscard]] std::string mpi_library_name();

}  // namespace flashoverlap

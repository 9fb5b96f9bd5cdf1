#pragma once

#include <mpi.h>

#include <string>
#include <string_view>

namespace flashoverlap::comm::mpi {

/// Throws Error(kCommunication) with MPI's own text when `code` is not MPI_SUCCESS. `what` names the MPI
/// call.
void check(int code, std::string_view what);

/// MPI's text for an error code.
std::string error_text(int code);

}  // namespace flashoverlap::comm::mpi
